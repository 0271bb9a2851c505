"""What an evaluation has played is found again, exactly, and nothing else is taken for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.control.rules import Uniform
from esper.errors import RunError
from esper.lab.evaluate import evaluate_run
from esper.lifecycle.rules import Rules
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train.evaluation import (
    CohortTask,
    EvaluationConfig,
    EvaluationProgress,
    EvaluationResult,
    create_baselines,
    evaluate_cohort,
    split_into_cohorts,
)
from esper.train.recorder import EpisodeLog
from esper.train.workers import LocalWorkers
from lab.planted import EXPLODED
from train.runs import ignore, started, tiny

pytestmark = pytest.mark.landing

HERE = {"policy": "abc"}


@pytest.fixture(scope="module")
def tasks() -> list[CohortTask]:
    suite = get_suite("short")
    instances = suite.sample(3, "heldout", np.random.default_rng(1))
    controllers = [Uniform(), create_baselines(suite)[-1]]
    return [
        task for one in controllers for task in split_into_cohorts([one], EvaluationConfig("short", Rules()), instances)
    ]


@pytest.fixture
def log(tasks: list[CohortTask]) -> EpisodeLog:
    (played,) = evaluate_cohort(tasks[0])
    return played.logs[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def assert_same(one: EpisodeLog, other: EpisodeLog) -> None:
    assert vars(one).keys() == vars(other).keys()
    for name, value in vars(one).items():
        assert same(value, vars(other)[name]), name


def test_a_tally_survives_json(log: EpisodeLog):
    assert log.changes
    log.rollbacks.append(replace(EXPLODED, loss_after=float("inf"), metric_after=0.1))
    text = json.dumps(log.to_json())
    assert_same(EpisodeLog.from_json(json.loads(text), get_suite("short"), log.instances), log)


@pytest.mark.parametrize("change", [{"more": []}, {}])
def test_a_tally_of_another_kind_is_refused(log: EpisodeLog, change: dict[str, Any]):
    record = log.to_json() | change
    if not change:
        del record["kept"]
    with pytest.raises(ValueError, match="not the record of a log"):
        EpisodeLog.from_json(record, get_suite("short"), log.instances)


class Counting(LocalWorkers):
    """Plays in this process and counts."""

    def __init__(self) -> None:
        super().__init__(1)
        self.played = 0

    def as_completed(self, function: Any, tasks: Any) -> Any:
        self.played += len(tasks)
        return super().as_completed(function, tasks)


def played(folder: Path, tasks: list[CohortTask], **circumstances: str) -> tuple[int, list[list[EvaluationResult]]]:
    """How many cohorts were taken over, and what came of all."""
    progress = EvaluationProgress(folder, {**HERE, **circumstances}, tasks)
    return progress.cached_count, progress.evaluate_cohorts(LocalWorkers(1), tasks)


@pytest.fixture
def folder(tmp_path: Path, tasks: list[CohortTask]) -> Path:
    played(tmp_path / "progress", tasks)
    return tmp_path / "progress"


def test_what_was_played_is_taken_over_exactly(folder: Path, tasks: list[CohortTask]):
    workers = Counting()
    progress = EvaluationProgress(folder, HERE, tasks)
    found = progress.evaluate_cohorts(workers, tasks)
    assert (progress.cached_count, workers.played) == (2, 0)
    for task, cohort in zip(tasks, found, strict=True):
        for one, other in zip(cohort, evaluate_cohort(task), strict=True):
            assert one.records == other.records
            assert_same(one.logs[0], other.logs[0])
    progress.remove()
    assert not folder.exists()


def shorter(tasks: list[CohortTask]) -> list[CohortTask]:
    """The same with an instance less."""
    part = tasks[0].parts[0]
    return [replace(tasks[0], parts=[part._replace(instances=part.instances[:2])]), tasks[1]]


def test_whatever_changes_makes_what_was_played_stale(folder: Path, tasks: list[CohortTask]):
    (folder / ".some.json.partial").touch()
    assert played(folder, shorter(tasks))[0] == 1
    assert len(list(folder.iterdir())) == 2
    assert played(folder, tasks, policy="abd")[0] == 0
    assert len(list(folder.iterdir())) == 2
    assert played(folder, tasks, policy="abd")[0] == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def another_score(path: Path) -> None:
    file = json.loads(path.read_text())
    file["value"][0]["records"][0]["score"] += 1
    path.write_text(json.dumps(file))


def empty(path: Path) -> None:
    path.write_text("")


def foreign(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize("damage", [cut, another_score, empty, foreign])
def test_a_damaged_file_is_played_anew(folder: Path, tasks: list[CohortTask], damage: Callable[[Path], None]):
    whole = played(folder, tasks)[1]
    for path in folder.iterdir():
        damage(path)
    assert EvaluationProgress(folder, HERE, tasks).cached_count == 0
    again = played(folder, tasks)[1]
    assert [one.records for cohort in again for one in cohort] == [one.records for cohort in whole for one in cohort]


def test_a_folder_that_cannot_be_used(tmp_path: Path, tasks: list[CohortTask]):
    (tmp_path / "progress").touch()
    with pytest.raises(RunError, match="cannot use .*progress .*: delete it and try again"):
        EvaluationProgress(tmp_path / "progress", HERE, tasks)


def test_another_policy_takes_nothing_over(tmp_path: Path):
    counts: list[tuple[int, int]] = []

    def stop(done: int, total: int, current: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    def report(known: int, total: int) -> None:
        counts.append((known, total))

    with started(tmp_path / "run", tiny("iterations=2")) as trainer, LocalWorkers(1) as workers:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                evaluate_run(trainer.run, workers, 2, 0, stop, report)
        trainer.train(ignore)
        evaluate_run(trainer.run, workers, 2, 0, taken_over=report)
    assert counts == [(0, 11), (2, 11), (0, 11)]
    assert not RunDirectory(tmp_path / "run").evaluation_progress.exists()
