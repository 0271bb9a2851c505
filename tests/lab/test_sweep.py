"""A sweep refuses mistakes before it makes anything, trains trials as runs, prunes, ranks, and goes on when killed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState

from esper.cli import main
from esper.commands.sweep import CAUTION
from esper.config.loading import load_settings
from esper.errors import ConfigError
from esper.lab.sweep import Sweep, load_space
from esper.runs.run_directory import RunDirectory
from esper.train.settings import TrainSettings
from train.launching import assert_same_end, launch
from train.runs import ignore, started
from train.short_suite import short_suite

Capture = pytest.CaptureFixture[str]
BASE = """
base:
  suite: short
  environments: 8
  shards: 1
  probe_instances: 2
  iterations: 2
  checkpoint_every: 1
  policy: {hidden: 16, width: 16}
  ppo: {group: 4, minibatches: 2, epochs: 1}
"""


@pytest.fixture(autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


def sweep(folder: Path, space: str, *more: str) -> int:
    return main(sweep_words(folder, space, *more))


def sweep_words(folder: Path, space: str, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "space.yaml"
    file.write_text(space)
    return ["sweep", str(file), "--run-dir", str(folder / "sweep"), "--workers", "1", "--instances", "4", *more]


def trials_of(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'sweep' / 'study.db'}")
    return optuna.load_study(study_name="sweep", storage=storage).trials


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {seed: [1]}", "unknown key `grid`, known here: base, space"),
        ("base: {seed: 1}", "has nothing to search: list values or ranges of settings under `space`"),
        ("space: {seed: 1}", "space: `seed` must be a list of values, or low and high, not 1"),
        ("space: {seed: []}", "space: `seed` must be a list of values, or low and high, not []"),
        ("space: {seed: {low: 1, hihg: 2}}", "space: `seed`: unknown key `hihg`, did you mean `high`?"),
        ("space: {seed: {low: 1}}", "space: `seed`: key `high` is missing"),
        ("space: {seed: {low: 2, high: 1}}", "space: `seed`: `low <= high` must hold"),
        ("space: {ppo.clip: {low: 0.1, high: 0.5, log: true, step: 0.1}}", "space: `ppo.clip`: The parameter `step`"),
        ("space: {seed: {low: 0, high: 2, step: 0.5}}", "step is 0.5, but the setting is an integer"),
        ("space: {seed: {low: 0.5, high: 2}}", "space: `seed` is 0.5, but must be a valid integer"),
        ("space: {ppo.normalize: {low: 0, high: 1}}", "unknown key `ppo.normalize`"),
        ("space: {strategy: {low: 0, high: 1}}", "space: `strategy` is 0.0, but must be"),
        ("space: {ppo.epochs: {low: 0, high: 4}}", "space: `ppo.epochs` is 0.0, but must be at least 1"),
        ("base: {sed: 1}\nspace: {seed: [1]}", "base: unknown key `sed`, did you mean `seed`?"),
        ("space: {ppo.epoch: [1]}", "space: unknown key `ppo.epoch`, did you mean `ppo.epochs`?"),
        ("space: {ppo.epochs: [1, x]}", "space: `ppo.epochs` is 'x'"),
        ("base: {seed: 1}\nspace: {seed.x: [1]}", "space: `seed.x`: `seed` is a value, it has no keys below it"),
        ("space: {environments: [128, 24]}", "space (environments=24): environments (24) must be a multiple"),
        ("space: {policy.width: [5]}", "space (policy.width=5): `policy`: width 5 is not a multiple"),
        ("space: {suite: [tokens, digits]}", "train on different suites (digits, tokens): they cannot be ranked"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_built(tmp_path: Path, capsys: Capture, text: str, message: str):
    assert sweep(tmp_path, text) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("iterations", "--set iterations: write it as dotted.key=value"),
        ("iteration=3", "--set iteration=3: unknown key `iteration`, did you mean `iterations`?"),
        ("seed=3", "--set seed=3: `seed` is in `space` of "),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(tmp_path: Path, override: str, message: str):
    file = tmp_path / "space.yaml"
    file.write_text("space: {seed: [1, 2]}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_space(file, [override])
    assert load_space(file, ["ppo.epochs=3"]).build_settings({"seed": 2}).ppo.epochs == 3


@pytest.mark.parametrize("number", ["0", "1000000000"])
def test_a_number_of_trials_that_nobody_can_run_is_refused(tmp_path: Path, capsys: Capture, number: str):
    assert sweep(tmp_path, "space: {seed: [1]}", "--trials", number) == 2
    assert f"--trials {number}: give 1 to 10000" in capsys.readouterr().err


@pytest.mark.parametrize("space", ["{seed: [0, 1, 2]}", "{seed: {low: 0, high: 1000}}"])
@pytest.mark.parametrize("trials", [1, 2])
def test_no_more_trials_are_run_than_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: str, trials: int
):
    run: list[str] = []

    def score(_: Sweep, study: optuna.Study, trial: optuna.Trial, name: str, *rest: object) -> None:
        run.append(name)
        study.tell(trial, 0.5)

    monkeypatch.setattr("esper.lab.sweep._run_trial", score)
    for _ in range(2):  # the second time all is done already
        assert sweep(tmp_path, f"{BASE}space: {space}", "--trials", str(trials)) == 0
        assert run == [f"trial-{number:03}" for number in range(trials)]


def test_many_lists_are_never_multiplied(tmp_path: Path):
    keys = ("seed", "telemetry.watched", "ppo.chunk", "policy.hidden", "policy.width", "probe_every", "iterations")
    file = tmp_path / "space.yaml"
    file.write_text("space:\n" + "".join(f"  {key}: {list(range(4, 122, 2))}\n" for key in keys))
    began = time.perf_counter()
    space = load_space(file)
    assert space.combinations == 59 ** len(keys)
    assert next(space.iterate_combinations()) == dict.fromkeys(keys, 4)
    assert time.perf_counter() - began < 2


def test_a_range_has_the_type_of_its_setting(tmp_path: Path):
    file = tmp_path / "space.yaml"
    file.write_text(
        "space: {ppo.learning_rate: {low: 1.0e-4, high: 1, log: true}, policy.hidden: {low: 16, high: 64, step: 16},"
        " rules.alpha_targets: [[0.5, 1.0], [1.0]]}"
    )
    space = load_space(file)
    assert space.distributions["ppo.learning_rate"] == FloatDistribution(1e-4, 1.0, log=True)
    assert space.distributions["policy.hidden"] == IntDistribution(16, 64, step=16)
    values = space.decode_values({"rules.alpha_targets": "[0.5, 1.0]", "policy.hidden": 32})
    assert space.build_settings(values).rules.alpha_targets == (0.5, 1.0)


@pytest.mark.slow
def test_trials_are_runs_ranked_best_first_and_a_refused_one_ends_nothing(tmp_path: Path, capsys: Capture):
    space = f"{BASE}space: {{seed: [0, 1], ppo.minibatches: [2, 16]}}"  # of 8 environments, 16 cannot be made
    assert sweep(tmp_path, space, "--json") == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    states = [one["state"] for one in record["ranking"]]
    assert states == ["finished", "finished", "refused", "refused"]  # every combination, once
    assert record["ranking"][0]["score"] >= record["ranking"][1]["score"]
    assert "8 environments cannot be split into 16 minibatches" in record["ranking"][2]["refusal"]
    assert CAUTION in captured.err
    assert f"optuna-dashboard {record['study']}" in captured.err
    for one in record["ranking"][:2]:
        run = RunDirectory.open(tmp_path / "sweep" / one["trial"])
        settings = load_settings(TrainSettings, run.config)
        assert one["choices"] == {"seed": settings.seed, "ppo.minibatches": settings.ppo.minibatches}
        assert run.report.exists()
    best = tmp_path / "sweep" / record["ranking"][0]["trial"]
    with started(tmp_path / "alone", load_settings(TrainSettings, RunDirectory(best).config)) as trainer:
        trainer.train(ignore)
    assert_same_end(best, tmp_path / "alone")
    finished = next(one for one in trials_of(tmp_path) if one.state is TrialState.COMPLETE)
    assert list(finished.intermediate_values) == [1, 2]

    assert sweep(tmp_path, space, "--json") == 0  # all is only read
    assert json.loads(capsys.readouterr().out) == record
    assert sweep(tmp_path, space.replace("[0, 1]", "[0, 2]")) == 2
    assert "holds a sweep with another space or other instances: choose another --run-dir" in capsys.readouterr().err


@pytest.mark.slow
def test_trials_that_train_badly_are_pruned_and_have_no_score(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "esper.lab.sweep.PRUNERS", {"median": lambda _: optuna.pruners.ThresholdPruner(lower=2.0, n_warmup_steps=1)}
    )  # no J reaches that
    assert sweep(tmp_path, f"{BASE}space: {{seed: [0]}}", "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["ranking"]
    assert (one["state"], one["score"]) == ("pruned", None)
    (trial,) = trials_of(tmp_path)
    assert (trial.state, list(trial.intermediate_values)) == (TrialState.PRUNED, [1])


@pytest.mark.slow
def test_a_sweep_that_was_killed_comes_to_the_end_of_one_that_was_not(tmp_path: Path, capsys: Capture):
    space = BASE.replace("iterations: 2", "iterations: 4") + "space: {ppo.learning_rate: {low: 1.0e-4, high: 1.0e-2}}"
    words = ("--trials", "2", "--json")
    assert sweep(tmp_path / "whole", space, *words) == 0
    whole = json.loads(capsys.readouterr().out)["ranking"]

    killed = launch(sweep_words(tmp_path / "killed", space, *words))
    manifest = tmp_path / "killed" / "sweep" / "trial-001" / "checkpoints" / "iteration-00000002.json"
    while not manifest.exists() and killed.poll() is None:
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert [one.state for one in trials_of(tmp_path / "killed")] == [TrialState.COMPLETE, TrialState.RUNNING]
    assert sweep(tmp_path / "killed", space, *words) == 0
    output = capsys.readouterr()
    assert "trial-001: resuming after iteration " in output.err
    assert json.loads(output.out)["ranking"] == whole
    for trial in ("trial-000", "trial-001"):
        assert_same_end(tmp_path / "killed" / "sweep" / trial, tmp_path / "whole" / "sweep" / trial)
    states = (TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE)
    trials = trials_of(tmp_path / "killed")
    assert tuple(one.state for one in trials) == states
    assert list(trials[2].intermediate_values) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_says_how_to_go_on(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esper.lab.sweep.write_report", interrupt)
    assert sweep(tmp_path, f"{BASE}space: {{seed: [0]}}") == 130
    assert f"to continue, add --run-dir {tmp_path / 'sweep'} to the same command" in capsys.readouterr().out


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: Capture):
    with started(tmp_path / "sweep" / "trial-000", load_settings(TrainSettings, None, ["suite=short"])):
        pass
    assert sweep(tmp_path, f"{BASE}space: {{seed: [0]}}") == 2
    assert "holds other runs: choose another --run-dir" in capsys.readouterr().err
    (tmp_path / "sweep" / "study.db").write_text("no database")
    assert sweep(tmp_path, f"{BASE}space: {{seed: [0]}}") == 2
    error = capsys.readouterr().err
    assert re.search(r"cannot use .*study.db \(.*not a database\)", error)
    assert error.count("\n") == 1
