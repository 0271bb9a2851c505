"""`esper train`, `esper evaluate` and `esper report` from the command line."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from esper.cli import main
from esper.config.loading import load_settings
from esper.dash.pages import describe_population, describe_run
from esper.dash.progress import TrainingProgress
from esper.runs.events import RunEnded, RunExtended, RunResumed
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.serialization import Checkpoints
from esper.tasks.registry import get_suite
from esper.train.iteration import Iteration
from esper.train.settings import PRESETS, TrainSettings
from esper.train.trainer import Trainer
from train.runs import TINY

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]


def options(*overrides: str) -> list[str]:
    return [word for override in (*TINY, *overrides) for word in ("--set", override)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations; copy it before changing it."""
    path = tmp_path_factory.mktemp("commands") / "trained"
    assert main(["train", "--run-dir", str(path), *options("iterations=2")]) == 0
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of two iterations."""
    return shutil.copytree(trained, tmp_path / "run")


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize(("group", "told"), [(8, True), (4, False)])
def test_the_score_on_a_single_instance_is_not_compared_with_baselines_on_others(
    tmp_path: Path, capsys: Capture, group: int, told: bool
) -> None:
    overrides = options("iterations=1", "environments=8", f"ppo.group={group}", "ppo.minibatches=1")
    assert main(["train", "--run-dir", str(tmp_path / "run"), *overrides]) == 0
    assert ("its J is not comparable with the baselines" in " ".join(capsys.readouterr().out.split())) == told


def test_training_leaves_a_run_directory_of_its_own_and_a_line_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--seed", "7", "--json", *options("iterations=1")]) == 0
    captured = capsys.readouterr()
    (path,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", path.name)
    lines, record = captured.err.splitlines(), last_json(captured.out)
    assert captured.out.count("\n") == 1  # progress went to stderr
    assert (record["run"], record["iterations"], record["environment_steps"]) == (str(path), 1, 8 * 8)
    assert {"objective", "probe_score", "seconds", "environment_steps_per_second"} <= record.keys()
    assert {"none", "heuristic"} <= record["baselines"].keys()
    assert lines[-1] == f"run: {path}"
    assert f"compare it on new instances with: esper evaluate {path}" in lines
    for name in ("config.yaml", "run.db", "checkpoints", "report.html"):
        assert (path / name).exists()
    assert "seed: 7" in (path / "config.yaml").read_text()
    assert Checkpoints(path / "checkpoints").iterations() == [0, 1]


def test_training_says_in_what_it_differs_from_the_defaults(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    """`--set ppo.clip=0.1` changes one line of the configuration, and is one line of what is said."""
    path = tmp_path / "clipped"
    assert main(["train", "--run-dir", str(path), *options("iterations=2", "ppo.clip=0.1")]) == 0
    first, *said = capsys.readouterr().out.split("measuring baselines")[0].splitlines()
    assert first == "settings: different from the defaults in"
    expected = {*(override.split("=")[0] for override in TINY), "iterations", "ppo.clip"}
    assert {line.split(":")[0].strip() for line in said} == expected
    assert "  ppo.clip: 0.1 (default 0.2)" in said
    lines = [Path(run, "config.yaml").read_text().splitlines() for run in (trained, path)]
    assert [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]] == [("  clip: 0.2", "  clip: 0.1")]

    monkeypatch.setattr(Trainer, "train", lambda *_: None)
    monkeypatch.setattr(Trainer, "measure_baseline_levels", lambda _: {})
    assert main(["train", "--run-dir", str(tmp_path / "usual")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "settings: the defaults"


def test_settings_come_from_a_file_and_the_command_line(tmp_path: Path):
    config = tmp_path / "mine.yaml"
    config.write_text("iterations: 1\nreward: sparse\nseed: 3\n")
    words = ["train", "--config", str(config), "--run-dir", str(tmp_path / "run"), "--seed", "4"]
    assert main([*words, *options("reward=outcome")]) == 0
    resolved = (tmp_path / "run" / "config.yaml").read_text()
    assert "iterations: 1" in resolved
    assert "mode: outcome" in resolved
    assert "seed: 4" in resolved


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    path = tmp_path / "my run"
    show = TrainingProgress.add

    def show_and_press(view: TrainingProgress, iteration: Iteration) -> None:
        show(view, iteration)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingProgress, "add", show_and_press)
    assert main(["train", "--run-dir", str(path), *options("iterations=2")]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == f"resume with: esper train --resume '{path}'"
    assert Checkpoints(path / "checkpoints").iterations() == [0, 1]

    monkeypatch.undo()
    assert main(["train", "--resume", str(path), "--json"]) == 0
    assert last_json(capsys.readouterr().out)["iterations"] == 2


@pytest.mark.parametrize("ended", [True, False])
def test_a_complete_run_that_is_resumed_is_finished(run: Path, capsys: Capture, *, ended: bool):
    """Also if it was killed after its last checkpoint, or resumed by a version that took the end from it."""
    if not ended:
        with RunStore.open(run / "run.db") as store:
            store.emit(RunResumed(iteration=2, platform={"esper": "0"}))
    before = Checkpoints(run / "checkpoints").latest().sha256
    for _ in range(2):
        assert main(["train", "--resume", str(run)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (lines[0], lines[-1]) == ("the run is already complete", f"run: {run}")
    assert Checkpoints(run / "checkpoints").latest().sha256 == before, "it is not trained again"
    assert main(["runs", str(run.parent), "--json"]) == 0
    assert [listed["state"] for listed in last_json(capsys.readouterr().out)] == ["finished"]
    with RunReader.open(run / "run.db") as reader:
        assert len(reader.events(RunEnded)) == (1 if ended else 2)
        assert len(reader.events(RunResumed)) == (0 if ended else 1)


def test_evaluation_prints_a_table_writes_records_and_has_a_line_for_machines(run: Path, capsys: Capture):
    assert main(["evaluate", str(run), "--instances", "4", "--transfer", "2"]) == 0
    text = capsys.readouterr().out
    assert "4 held-out instances" in text
    assert "2 instances of families never trained on" in text
    *_, of_run, _, question, transfer, heldout = text.splitlines()
    assert (of_run, question) == (f"run: {run}", "Did learning help?")
    for line, instances in [(transfer, "2 transfer"), (heldout, "4 held-out")]:
        assert re.match(rf"(Yes|No|It learned, .*)\. On {instances} instances this policy scores", line)
    records = json.loads((run / "evaluation.json").read_text())
    assert {"policy", "untrained", "sampled", "none", "random", "all_at_start", "periodic", "heuristic"} <= {
        one["controller"] for one in records
    }
    assert "Not evaluated yet" not in (run / "report.html").read_text()

    assert main(["evaluate", str(run), "--instances", "4", "--transfer", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    record = last_json(captured.out)
    assert (record["run"], record["iteration"], record["heldout"]["instances"]) == (str(run), 2, 4)
    assert "transfer" not in record
    policy, other = (
        next(one for one in record["heldout"]["standings"] if one["name"] == name) for name in ("policy", "none")
    )
    assert other["score_interval"][0] <= other["score"] <= other["score_interval"][1]
    assert other["difference"] == pytest.approx(policy["score"] - other["score"])
    assert 0 <= other["probability_of_improvement"] <= 1


def refused(words: list[str], capsys: Capture) -> str:
    """The one sentence that a mistake ends in."""
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def test_a_checkpoint_of_other_settings_and_a_directory_in_use(run: Path, capsys: Capture):
    assert "is not empty" in refused(["train", "--run-dir", str(run)], capsys)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("hidden: 16", "hidden: 24"))
    assert "checkpoint" in refused(["evaluate", str(run)], capsys)


@pytest.mark.parametrize(
    "extra",
    [
        ["--seed", "1"],
        ["--set", "iterations=9", "--set", "seed=1"],
        ["--set", "iterations=1"],
        ["--run-dir", "elsewhere"],
        ["--preset", "scratch"],
    ],
    ids=" ".join,
)
def test_a_resumed_run_keeps_its_settings(extra: list[str], run: Path, capsys: Capture):
    before = (run / "config.yaml").read_text()
    assert "--resume uses the run's own settings" in refused(["train", "--resume", str(run), *extra], capsys)
    assert (run / "config.yaml").read_text() == before


def test_a_finished_run_is_extended_and_says_so(run: Path, capsys: Capture):
    for _ in range(2):  # the second time there is nothing left to do
        assert main(["train", "--resume", str(run), "--set", "iterations=3", "--json"]) == 0
        captured = capsys.readouterr()
        assert last_json(captured.out)["iterations"] == 3
    assert captured.err.splitlines()[0] == "the run is already complete"
    with RunReader.open(run / "run.db") as reader:
        (extended,) = reader.events(RunExtended)
        assert (extended.iteration, extended.before, extended.after) == (2, 2, 3)
        assert reader.metadata()["iterations"] == 3
        assert [number for number, _ in reader.series("objective")] == [1, 2, 3]
    assert "iterations: 3\n" in (run / "config.yaml").read_text()
    assert "Its iterations were raised from 2 to 3" in (run / "report.html").read_text()


def test_presets_are_listed_refined_and_not_mixed_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert set(PRESETS) >= {"advised", "scratch"}
    assert all(f"{name}:" in shown for name in PRESETS)

    monkeypatch.setattr(Trainer, "train", lambda *_: None)
    monkeypatch.setattr(Trainer, "measure_baseline_levels", lambda _: {})
    for name in PRESETS:
        path = tmp_path / name
        assert main(["train", "--preset", name, "--run-dir", str(path), "--set", "iterations=2"]) == 0
        settings = load_settings(TrainSettings, path / "config.yaml")
        assert settings.iterations == 2
        assert (settings.policy.advice is None) == (name == "scratch")
    assert "did you mean 'scratch'?" in refused(["train", "--preset", "scrach"], capsys)
    assert "give one" in refused(["train", "--preset", "scratch", "--config", "mine.yaml"], capsys)


@pytest.mark.parametrize("controller", ["look", "heuristic", "a run"])
def test_any_controller_plays_a_suite_without_a_run(controller: str, run: Path, capsys: Capture):
    name = str(run) if controller == "a run" else controller
    assert main(["evaluate", "--controller", name, "--suite", "short", "--instances", "4", "--json"]) == 0
    captured = capsys.readouterr()
    scores = last_json(captured.out)
    known = {"none", "random", "all_at_start", "schedule", "periodic", "heuristic", "look"}
    assert set(scores) == (known | {"policy"} if controller == "a run" else known)
    for found in scores.values():
        assert found["score_interval"][0] <= found["score"] <= found["score_interval"][1]
    assert "On 4 held-out instances this controller scores" in captured.err
    assert "for this controller on other instances" in captured.err


def test_a_rule_that_plays_leaves_a_run_with_events_dashboard_and_report(tmp_path: Path, capsys: Capture):
    path, words = tmp_path / "run", ["evaluate", "--controller", "heuristic", "--suite", "short", "--instances", "4"]
    assert main([*words, "--run-dir", str(path), "--json"]) == 0
    recorded = last_json(capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    alone = last_json(capsys.readouterr().out)
    assert {name: found["score"] for name, found in recorded.items()} == pytest.approx(
        {name: found["score"] for name, found in alone.items()}, abs=1e-4
    )
    with RunReader.open(path / "run.db") as reader:
        networks = describe_population(reader, None)["networks"]
        assert [one["environment"] for one in networks] == [0, 1, 2, 3]
        assert all(len(one["steps"]) == get_suite("short").steps for one in networks)
        assert reader.rows("SELECT count(*) FROM seeds") != [(0,)]
        assert fmean(one["objective"] for one in networks) == pytest.approx(reader.series("objective")[0][1])
    assert describe_run("run", path / "run.db").items() >= {"state": "finished", "controller": "heuristic"}.items()
    page = (path / "report.html").read_text()
    assert all(text in page for text in ("How heuristic plays", "4 held-out instances", "first episode of heuristic"))
    (path / "report.html").unlink()
    assert main(["report", str(path)]) == 0
    assert (path / "report.html").read_text() == page
    for command in (["evaluate", str(path)], ["train", "--resume", str(path)]):
        assert "a run of `esper evaluate`, which has no policy" in refused(command, capsys)
    assert "is not empty" in refused([*words, "--run-dir", str(path)], capsys)


def test_a_controller_plays_the_families_and_instances_that_are_asked_for(capsys: Capture):
    def scores(*words: str) -> dict[str, Any]:
        assert main(["evaluate", "--suite", "short", "--instances", "2", "--json", *words]) == 0
        return last_json(capsys.readouterr().out)

    usual = scores()
    assert scores("--seed", "0", "--split", "heldout", "--controller", "look") == usual
    assert scores("--seed", "1") != usual
    assert scores("--split", "transfer") != usual


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate: give the directory of a run, or --suite"),
        (["--controller", "look"], "nothing to evaluate"),
        (["RUN", "--controller", "look"], "--controller cannot be combined with a run"),
        (["RUN", "--split", "transfer"], "--split cannot be combined with a run"),
        (["RUN", "--seed", "0"], "--seed cannot be combined with a run"),
        (["RUN", "--run-dir", "new"], "--run-dir cannot be combined with a run"),
        (["--controller", "look", "--suite", "short", "--transfer", "3"], "--transfer needs a run"),
        (["--controller", "lok", "--suite", "short"], "no controller 'lok'; did you mean 'look'?"),
        (["--controller", "look", "--suite", "shor"], "no suite is called 'shor'; did you mean 'short'?"),
        (["--controller", "look", "--suite", "short", "--instances", "1"], "give at least 2"),
        (["--controller", "look", "--suite", "short", "--seed", "-1"], "seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_evaluated_is_refused(words: list[str], message: str, run: Path, capsys: Capture):
    assert message in refused(["evaluate", *(str(run) if word == "RUN" else word for word in words)], capsys)


def test_a_missing_device_is_found_before_there_is_a_run(tmp_path: Path, capsys: Capture):
    words = ["train", "--run-dir", str(tmp_path / "run"), "--set", "devices=cuda:77"]
    assert "there is no device 'cuda:77' on this machine: choose from cpu" in refused(words, capsys)
    assert not (tmp_path / "run").exists()
