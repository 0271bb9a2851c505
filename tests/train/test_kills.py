"""A process that is killed at any moment loses nothing: the next one ends exactly where it would have ended."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from train.runs import Launcher, assert_same_end, resume_words, train_words

pytestmark = pytest.mark.landing

Count = Callable[[str, int], None]

SETTINGS = ("iterations=3", "checkpoint_every=2", "probe_every=2", "keep_checkpoints=1")
EVALUATION = ("--instances", "4", "--transfer", "2")

KILLED, DONE = -9, 0

FEW = [("in the store's schema", 1), ("half the tensors", 2), ("store's flush", 4), ("probe", 5)]
MANY = [
    *(("in the store's schema", 1), ("making the store", 1), ("store's flush", 1), ("half the tensors", 1)),
    *(("no manifest", 1), ("fresh checkpoint", 1), ("baselines", 3), ("rollout", 12), ("update", 1)),
    *(("update", 3), ("probe", 2), ("store's flush", 3), ("no manifest", 2), ("half the manifest", 2)),
    *(("fresh checkpoint", 2), ("rollout", 20)),
]
RANDOM = 6
TRIES = 4


@pytest.fixture(scope="module")
def whole(fork: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted run, and how long it took."""
    path = tmp_path_factory.mktemp("kills") / "whole"
    began = time.monotonic()
    assert fork.run(train_words(path, *SETTINGS))[0] == DONE
    return path, time.monotonic() - began


def killed_and_resumed(fork: Launcher, path: Path, whole: Path, place: str | None, count: int, after: float) -> bool:
    """Whether the kill came before the end; either way the run ends as the whole one did."""
    status, output = fork.run(train_words(path, *SETTINGS), place, count, after if place is None else None)
    assert status in (KILLED, DONE), output
    if (path / "config.yaml").exists():
        status_then, output = fork.run(resume_words(path))
    else:  # nothing was begun, so the directory is as good as new
        status_then, output = fork.run(train_words(path, *SETTINGS))
    assert status_then == DONE, output
    assert_same_end(path, whole)
    return status == KILLED


@pytest.mark.parametrize(
    ("place", "count"), [*FEW, *(pytest.param(*kill, marks=pytest.mark.slow) for kill in MANY if kill not in FEW)]
)
def test_a_run_survives_a_kill_at_every_place(
    fork: Launcher, whole: tuple[Path, float], tmp_path: Path, place: str, count: int, count_figure: Count
):
    assert killed_and_resumed(fork, tmp_path / "run", whole[0], place, count, 0)
    count_figure("training runs killed and resumed bit-exactly", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM))
def test_a_run_survives_a_kill_at_any_time(
    fork: Launcher, whole: tuple[Path, float], tmp_path: Path, seed: int, count_figure: Count
):
    """On a machine that has become faster meanwhile, the kill may come too late; then a run is killed sooner."""
    after = random.Random(seed).random() * whole[1]
    runs = (killed_and_resumed(fork, tmp_path / f"run{n}", whole[0], None, 0, after / 2**n) for n in range(TRIES))
    assert any(runs), "no run was killed"
    count_figure("training runs killed and resumed bit-exactly", 1)


@pytest.mark.slow
def test_a_run_survives_one_kill_after_another(
    fork: Launcher, whole: tuple[Path, float], tmp_path: Path, count_figure: Count
):
    path, kills = tmp_path / "run", [("no manifest", 1), ("baselines", 5), ("probe", 3), ("update", 2), ("rollout", 2)]
    words = train_words(path, *SETTINGS)
    for place, count in kills:
        assert fork.run(words, place, count)[0] == KILLED
        words = resume_words(path)
    assert fork.run(words)[0] == DONE
    assert_same_end(path, whole[0])
    count_figure("training runs killed and resumed bit-exactly", len(kills))


def results(path: Path) -> tuple[bytes, bytes]:
    assert not (path / "evaluation-progress").exists()
    return (path / "evaluation.json").read_bytes(), (path / "behaviour.json").read_bytes()


@pytest.fixture(scope="module")
def evaluated(fork: Launcher, whole: tuple[Path, float], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation that nobody interrupted."""
    path = shutil.copytree(whole[0], tmp_path_factory.mktemp("kills") / "evaluated")
    assert fork.run(["evaluate", str(path), *EVALUATION])[0] == DONE
    return path


def evaluation_killed_and_resumed(fork: Launcher, path: Path, expected: Path, place: str, count: int) -> str:
    words = ["evaluate", str(path), *EVALUATION]
    assert fork.run(words, place, count)[0] == KILLED
    assert not (path / "evaluation.json").exists()
    status, output = fork.run(words)
    assert status == DONE, output
    assert results(path) == results(expected)
    return output


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("place", "count", "kept"),
    [
        ("half a cohort", 9, 8),
        pytest.param("probe", 3, 0, marks=SLOW),
        pytest.param("half a cohort", 1, 0, marks=SLOW),
        pytest.param("whole cohort", 1, 1, marks=SLOW),
        pytest.param("whole cohort", 9, 9, marks=SLOW),
        pytest.param("whole cohort", 22, 22, marks=SLOW),
    ],
)
def test_a_killed_evaluation_plays_only_what_is_missing(
    fork: Launcher,
    whole: tuple[Path, float],
    evaluated: Path,
    tmp_path: Path,
    place: str,
    count: int,
    kept: int,
    count_figure: Count,
):
    path = shutil.copytree(whole[0], tmp_path / "run")
    output = evaluation_killed_and_resumed(fork, path, evaluated, place, count)
    taken_over = f"reused from an earlier evaluation: {kept} of 22 cohorts"
    assert taken_over in output if kept else "reused from" not in output
    count_figure("evaluations killed and resumed bit-exactly", 1)
