"""A sweep on Ray comes to the end of a local one, whoever dies on the way."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.lab.sweep import RankedTrial, TrialProgress
from esper.runs.lock import is_held
from esper.runs.run_directory import RunDirectory
from esper.train.workers import Backend, LocalWorkers, Workers
from lab import short_sweep
from lab.short_sweep import DOOMED, ITERATIONS, sweep_short
from train.launching import ENVIRONMENT, assert_same_end

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.slow  # a Ray takes seconds to start

TRIALS = ("trial-000", "trial-001")


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        with Backend("ray", workers=2).open(2) as workers:
            yield workers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankedTrial]]:
    """A local sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with LocalWorkers(1) as workers:
        return folder, sweep_short(folder, workers, lambda _: None)


def assert_same(folder: Path, ranking: list[RankedTrial], whole: tuple[Path, list[RankedTrial]]) -> None:
    assert ranking == whole[1]
    for trial in TRIALS:
        assert_same_end(folder / trial, whole[0] / trial)


def test_a_sweep_is_the_local_one(two: Workers, whole: tuple[Path, list[RankedTrial]], tmp_path: Path):
    told: list[TrialProgress] = []
    assert_same(tmp_path, sweep_short(tmp_path, two, told.append), whole)
    for number in range(len(TRIALS)):
        assert [one.done for one in told if one.number == number] == list(range(1, ITERATIONS + 1))


def test_a_trial_whose_worker_is_killed_goes_on_to_the_same_end(
    two: Workers, whole: tuple[Path, list[RankedTrial]], tmp_path: Path
):
    told: list[TrialProgress] = []
    mark = tmp_path / "mark"
    assert_same(tmp_path, sweep_short(tmp_path, two, told.append, str(mark)), whole)
    assert mark.exists()
    assert [one.done for one in told if one.number == DOOMED] == list(range(1, ITERATIONS + 1))


def wait_until_free(folder: Path) -> None:
    """Ray ends the workers of a driver that was killed, a moment later."""
    end = time.monotonic() + 60
    while any(is_held(RunDirectory(folder / trial).lock) for trial in TRIALS):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_sweep_whose_driver_is_killed_goes_on_to_the_same_end(
    two: Workers, whole: tuple[Path, list[RankedTrial]], tmp_path: Path
):
    words = [sys.executable, short_sweep.__file__, str(tmp_path)]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert f"{DOOMED} 2\n" in driver.stdout
        driver.kill()
    wait_until_free(tmp_path)
    told: list[TrialProgress] = []
    assert_same(tmp_path, sweep_short(tmp_path, two, told.append), whole)
    for number in range(len(TRIALS)):
        assert [one.done for one in told if one.number == number] == list(range(1, ITERATIONS + 1))
    assert any(one.iteration is None for one in told)  # it did not begin anew
