"""One process writes to a run, and whoever else tries is told which."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from esper.errors import RunError
from esper.runs.run_directory import RunDirectory, is_locked
from esper.train.workers import LocalWorkers
from train.launching import launch, train_words
from train.worker_tasks import holds

pytestmark = pytest.mark.landing


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_a_second_user_is_told_of_the_first(run: RunDirectory):
    sentence = rf"run {run.path} is in use by `esper train` \(process {os.getpid()}\): wait until it ends, or stop it"
    with run.locked("esper train"), pytest.raises(RunError, match=sentence), run.locked("esper evaluate"):
        pass
    with run.locked("esper evaluate"):
        assert run.lock.read_text() == f"`esper evaluate` (process {os.getpid()})"


def test_an_error_gives_the_lock_back(run: RunDirectory):
    with pytest.raises(ZeroDivisionError), run.locked("esper train"):
        raise ZeroDivisionError
    with run.locked("esper train"):
        pass


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOLCK, "cannot lock .*: move the run to a file system that has locks"),
        (errno.ENOSPC, "cannot write in .*: free some space"),
    ],
)
def test_a_file_system_that_does_not_play_along(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
):
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=sentence), run.locked("esper train"):
        pass


@pytest.mark.slow
def test_workers_do_not_hold_the_lock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with run.locked("esper train"), LocalWorkers(2) as workers:
        assert workers.map(holds, [str(run.lock)]) == [False]
    with run.locked("esper train"):
        pass


def test_the_lock_vanishes_with_a_killed_process(tmp_path: Path):
    path = tmp_path / "run"
    with launch(train_words(path, "iterations=12")) as process:
        assert process.stdout is not None
        assert any("iteration 1" in line for line in process.stdout)  # it is under way
        in_use = rf"in use by `esper train` \(process {process.pid}\)"
        with pytest.raises(RunError, match=in_use), RunDirectory.open(path).locked("esper evaluate"):
            pass
        process.send_signal(signal.SIGKILL)
    with RunDirectory.open(path).locked("esper evaluate"):
        pass


def test_whoever_only_looks_at_the_lock_hinders_nobody(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    run.lock.touch()
    descriptor = os.open(run.lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    # It lets go while the other one waits to try again.
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(descriptor))
    with run.locked("esper train"):
        monkeypatch.undo()
        assert is_locked(run.lock)
    assert not is_locked(run.lock)
    assert not is_locked(run.path / "no such file")


def test_lookers_do_not_take_each_other_for_a_holder(run: RunDirectory):
    run.lock.touch()
    run.lock.chmod(0o444)
    descriptor = os.open(run.lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as one who looks now
    assert not is_locked(run.lock)
    os.close(descriptor)
    run.lock.chmod(0o644)
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(is_locked, [run.lock] * 1000))
        with run.locked("esper train"):
            assert all(threads.map(is_locked, [run.lock] * 1000))
