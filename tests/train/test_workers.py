"""Workers return what the tasks asked for, in order, and leave Ctrl-C to the process they serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.errors import RunError
from esper.train.workers import LocalWorkers
from train.launching import ENVIRONMENT
from train.worker_tasks import (
    circumstances,
    count_and_fail,
    count_up,
    die_once_there,
    fail_on_two,
    ignored,
    returned_memory,
    sleep_in,
    square,
)


def test_one_worker_is_this_process():
    with LocalWorkers(1) as workers:
        assert workers.map(square, [3, 1, 2]) == [9, 1, 4]
        (found,) = workers.map(circumstances, [0])
    assert found == (os.getpid(), False, 1)


def test_errors_reach_the_caller():
    with pytest.raises(ValueError, match="two"), LocalWorkers(1) as workers:
        workers.map(fail_on_two, [1, 2, 3])


@pytest.mark.slow
def test_processes_work_in_order_and_ignore_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    with LocalWorkers(2) as workers:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
        assert workers.map(square, list(range(6))) == [0, 1, 4, 9, 16, 25]
        (found,) = workers.map(circumstances, [0])
        (returned,) = workers.map(returned_memory, [0])
        with pytest.raises(ValueError, match="two"):
            workers.map(fail_on_two, [1, 2, 3])
    process, ignores, threads = found
    assert process != os.getpid()
    assert ignores
    assert threads == 1
    assert returned < 1


def test_what_tasks_say_is_heard_before_they_end():
    heard: list[int] = []
    with LocalWorkers(1) as workers:
        assert workers.gather(count_up, [3, 0, 2], heard.append) == [3, 0, 2]
        assert heard == [0, 1, 2, 0, 1]
        with pytest.raises(ValueError, match="two"):
            workers.gather(count_and_fail, [2, 3], heard.append)
    assert heard == [0, 1, 2, 0, 1, 2]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWorkers]:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with LocalWorkers(2) as workers:
        yield workers


@pytest.mark.slow
def test_what_tasks_say_in_processes_is_heard_in_the_order_of_each(two: LocalWorkers):
    heard: list[int] = []
    assert two.gather(count_up, [4, 4, 1], heard.append) == [4, 4, 1]
    assert sorted(heard) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert heard.index(0) < heard.index(1) < heard.index(2) < heard.index(3)
    with pytest.raises(ValueError, match="two"):
        two.gather(count_and_fail, [2, 3], heard.append)
    heard.clear()
    assert two.gather(count_up, [2], heard.append) == [2]
    assert heard == [0, 1]


@pytest.mark.slow
def test_results_come_as_they_are_known_and_a_call_may_be_given_up(two: LocalWorkers):
    assert two.map(ignored, [0]) == [{signal.SIGINT, signal.SIGTERM}]
    results = two.as_completed(square, [2, 3, 4, 5])
    index, result = next(results)
    assert result == (index + 2) ** 2
    results.close()
    with pytest.raises(ValueError, match="two") as caught:
        two.map(fail_on_two, [2, 2, 2, 2])
    assert "in fail_on_two" in caught.value.__notes__[0]
    assert two.map(square, [1, 2, 3]) == [1, 4, 9]


def processes_at_work(folder: Path, count: int) -> list[int]:
    """As `sleep_in` tells them."""
    while len(found := [int(file.name) for file in folder.iterdir()]) < count:
        time.sleep(0.02)
    return found


def gone(process: int) -> bool:
    """Whether it is no more, or waits to be buried."""
    try:
        return ") Z " in Path("/proc", str(process), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_an_error_ends_workers_in_the_middle_of_their_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    found: list[int] = []

    def press() -> None:
        found.extend(processes_at_work(tmp_path, 2))
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt), LocalWorkers(2) as workers:
        workers.map(sleep_in, [str(tmp_path)] * 2)
    began = time.monotonic()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert len(found) == 2
    assert all(gone(process) for process in found)
    assert time.monotonic() - began < 1


@pytest.mark.slow
def test_a_worker_that_dies_is_a_typed_error(two: LocalWorkers):
    began = time.monotonic()
    sentence = r"a worker process ended unexpectedly \(SIGKILL\), perhaps for want of memory: .*--resume"
    with pytest.raises(RunError, match=sentence):
        two.map(die_once_there, ["", "die"])
    assert time.monotonic() - began < 30
    with pytest.raises(RunError, match=sentence):
        two.map(square, [1, 2])


SCRIPT = """
import sys
from esper.train import workers
from train.worker_tasks import sleep_in
workers.os.cpu_count = lambda: 2
if __name__ == "__main__":
    pool = workers.LocalWorkers(2)  # no `with`, and nobody ends it
    results = pool.as_completed(sleep_in, sys.argv[1:] * 2)
    sys.argv[2:] or next(results)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path: Path):
    script, folder = tmp_path / "script.py", tmp_path / "tasks"
    script.write_text(SCRIPT)
    folder.mkdir()
    with subprocess.Popen([sys.executable, str(script), str(folder)], env=ENVIRONMENT) as parent:
        found = processes_at_work(folder, 2)
        parent.kill()
    end = time.monotonic() + 5
    while not all(gone(process) for process in found):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_workers_nobody_ended_do_not_keep_their_parent(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(tmp_path), "no wait"]
    assert subprocess.run(words, env=ENVIRONMENT, check=False, timeout=60).returncode == 0
