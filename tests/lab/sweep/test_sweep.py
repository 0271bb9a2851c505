"""A sweep trains every trial as `esper train` would, ranks them, and goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.config.loading import load_settings
from esper.lab.sweep import CAUTION, RankedTrial, Sweep, TrialProgress, _TrialTask, load_space, run_sweep
from esper.runs.run_directory import RunDirectory
from esper.train.results import ArmResults, Result
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers
from train.launching import newest_tensors
from train.runs import TINY, ignore, started
from train.short_suite import short_suite

Capture = pytest.CaptureFixture[str]
SPACE = """
base:
  suite: short
  environments: 8
  probe_instances: 2
  iterations: 2
  checkpoint_every: 1
  policy: {hidden: 16, width: 16}
  ppo: {group: 4, minibatches: 2}
grid: {shards: [1, 2]}
random: {ppo.epochs: {low: 1, high: 3, int: true}}
"""


@pytest.fixture(scope="module", autouse=True)
def _short_suite() -> Iterator[None]:
    with short_suite():
        yield


def sweep(folder: Path, space: str = SPACE, *more: str) -> int:
    file = folder / "space.yaml"
    file.write_text(space)
    words = ["sweep", str(file), "--run-dir", str(folder / "sweep"), "--workers", "1", "--instances", "4"]
    return main([*words, *more])


def test_the_best_trial_comes_first_and_the_file_grows_with_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores = (0.25, 0.75, 0.5, 0.75)

    def played(task: _TrialTask) -> Generator[TrialProgress, None, ArmResults]:
        yield from ()
        score = scores[task.number]
        changes = enumerate((-1, 1))
        outcomes = [Result("policy", f"{n}", "a", "", score + one, 0.9, 30, 100, flops=0) for n, one in changes]
        return ArmResults(0, outcomes)

    def finished(number: int, ranked: RankedTrial) -> None:
        assert ranked.score == scores[number]
        counts.append(json.loads(plan.ranking.read_text())["finished"] if plan.ranking.exists() else 0)

    monkeypatch.setattr("esper.lab.sweep._compute_trial", played)
    file = tmp_path / "space.yaml"
    file.write_text("base: {suite: short}\ngrid: {seed: [3, 4, 5, 6]}")
    plan, counts = Sweep(tmp_path, load_space(file).trials(None, 0), instances=2), list[int]()
    with LocalWorkers(1) as workers:
        ranking = run_sweep(plan, workers, ignore_told, finished)
    assert [one.trial for one in ranking] == ["trial-001", "trial-003", "trial-002", "trial-000"]
    assert [one.choices for one in ranking] == [{"seed": 4}, {"seed": 6}, {"seed": 5}, {"seed": 3}]
    assert ranking[0].accuracy == pytest.approx(0.9)
    assert ranking[0].added == pytest.approx(0.3)
    assert counts == [0, 1, 2, 3]
    file_ranking = json.loads(plan.ranking.read_text())["ranking"]
    assert [one["trial"] for one in file_ranking] == [one.trial for one in ranking]


def ignore_told(_: TrialProgress) -> None:
    pass


@pytest.mark.slow
def test_trials_are_runs(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # only this process knows the suite
    assert sweep(tmp_path, SPACE, "--trials", "1", "--json") == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["trials"] == 2
    assert CAUTION in captured.err
    file = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert file["ranking"] == record["ranking"]
    assert (file["finished"], file["caution"]) == (2, CAUTION)
    assert record["best"] == record["ranking"][0]["trial"]
    for one in record["ranking"]:
        run = RunDirectory.open(tmp_path / "sweep" / one["trial"])
        settings = load_settings(TrainSettings, run.config)
        assert one["choices"] == {"shards": settings.shards, "ppo.epochs": settings.ppo.epochs}
        assert run.report.exists()
        with started(tmp_path / "alone" / one["trial"], settings) as trainer:
            trainer.train(ignore)
        alone = newest_tensors(tmp_path / "alone" / one["trial"])
        found = newest_tensors(run.path)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_to_the_same_end(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert sweep(whole, SPACE, "--trials", "1") == 0

    def interrupt(_view: object, told: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("esper.lab.sweep_view.SweepView.hear", interrupt)
        assert sweep(stopped, SPACE, "--trials", "1") == 130
    assert f"go on with the same command and --run-dir {stopped / 'sweep'}" in capsys.readouterr().out
    assert not (stopped / "sweep" / "sweep.json").exists()
    assert sweep(stopped, SPACE, "--trials", "1") == 0
    names = ("sweep/sweep.json",)
    assert [(stopped / name).read_text() for name in names] == [(whole / name).read_text() for name in names]
    capsys.readouterr()
    assert sweep(stopped, SPACE, "--trials", "1") == 0
    assert "iteration" not in capsys.readouterr().out.replace("iterations", "")  # all is only read


@pytest.mark.parametrize(
    ("space", "more", "message"),
    [
        ("grid: {suite: [tokens, digits]}", [], "train on different suites (digits, tokens): they cannot be ranked"),
        ("grid: {seed: [1]}", ["--instances", "0"], "0 instances give no score: ask for at least 1"),
        ("grid: {seed: [1]}", ["--workers", "0"], "--workers 0: ask for at least 1"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, capsys: Capture, space: str, more: list[str], message: str):
    assert sweep(tmp_path, space, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_trials_of_other_settings_are_refused(tmp_path: Path, capsys: Capture):
    with started(tmp_path / "sweep" / "trial-000", load_settings(TrainSettings, None, TINY)):
        pass
    assert sweep(tmp_path, "grid: {seed: [1]}") == 2
    assert "was trained with other settings: choose another --run-dir" in capsys.readouterr().err
