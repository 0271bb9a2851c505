"""Workers return the tasks' results in order, leave Ctrl-C to the process they serve, and end with it."""

import errno
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
from train.runs import ENVIRONMENT
from train.worker_tasks import (
    Placed,
    circumstances,
    die_once_there,
    double,
    fail_on_two,
    find_process,
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


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalWorkers]:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with LocalWorkers(2) as workers:
        yield workers


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [["cuda:0", "cuda:1"] * 4, ["cuda:0", "cuda:1", "cpu"] * 3, ["cuda:0"] * 3 + ["cuda:1"] * 3 + ["cuda:0"]],
    ids=["in turns", "with the CPU", "one after the other"],
)
def test_a_process_opens_one_gpu_at_most(two: LocalWorkers, devices: list[str]):
    opened: dict[int, set[str]] = {}
    # Of unequal lengths, so that no order of tasks keeps processes apart by itself.
    tasks = [Placed(device, 0.02 * (number % 3)) for number, device in enumerate(devices)]
    results = two.map(find_process, tasks)
    assert [device for _, device in results] == devices
    for process, device in results:
        opened.setdefault(process, set()).add(device)
    assert all(len(of_process - {"cpu"}) <= 1 for of_process in opened.values())
    assert sum(not gone(process) for process in opened) <= 2
    if devices[:2] == ["cuda:0", "cuda:1"]:
        assert len(opened) <= 3  # a free process takes the tasks for its own device first


def processes_at_work(folder: Path, count: int) -> list[int]:
    """As `sleep_in` writes them."""
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
    sentence = r"a worker process ended unexpectedly \(SIGKILL\), perhaps out of memory: .*--resume"
    with pytest.raises(RunError, match=sentence):
        two.map(die_once_there, ["", "die"])
    assert time.monotonic() - began < 30
    with pytest.raises(RunError, match=sentence):
        two.map(square, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**25, 1])
def test_a_worker_killed_amid_large_tasks_and_results_is_an_error_and_no_hang(two: LocalWorkers, size: int):
    """Whatever is on its way when it dies."""
    two.map(double, [bytes(1)] * 2)  # they have started
    (process, *_), *_ = two.map(circumstances, [0])
    killer = threading.Timer(0.2, os.kill, (process, signal.SIGKILL))
    killer.start()
    with pytest.raises(RunError, match="SIGKILL"):
        two.map(double, [bytes(size)] * 100_000)
    began = time.monotonic()
    two.end()
    assert time.monotonic() - began < 5


def test_how_far_a_call_is_can_be_described():
    with LocalWorkers(1) as workers:
        results = workers.as_completed(square, [2, 3])
        next(results)
        assert workers.describe_progress() == "1 of 2 tasks done, 0 under way, for up to 0 s"


@pytest.mark.slow
def test_a_full_temporary_folder_is_a_typed_error(two: LocalWorkers, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(RunError, match=r"cannot write .*esper-workers-.* \(No space left on device\): free some space"):
        two.map(square, [1, 2])


SCRIPT = """
import sys
from esper.train import workers
from train.worker_tasks import sleep_in
workers.os.cpu_count = lambda: 2
if __name__ == "__main__":
    with workers.LocalWorkers(2) as pool:
        pool.map(sleep_in, sys.argv[1:] * 2)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent_and_leave_no_files(tmp_path: Path):
    script, folder, files = tmp_path / "script.py", tmp_path / "tasks", tmp_path / "files"
    script.write_text(SCRIPT)
    folder.mkdir()
    files.mkdir()
    environment = ENVIRONMENT | {"TMPDIR": str(files)}
    with subprocess.Popen([sys.executable, str(script), str(folder)], env=environment) as parent:
        found = processes_at_work(folder, 2)
        assert any(files.glob("esper-workers-*"))
        parent.kill()
    end = time.monotonic() + 5
    while not all(gone(process) for process in found) or any(files.glob("esper-workers-*")):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 1.0, 3.0])
def test_a_signal_to_the_whole_group_ends_it_at_once(tmp_path: Path, wait: float):
    """Also while the workers start."""
    script, folder = tmp_path / "script.py", tmp_path / "tasks"
    script.write_text(SCRIPT.replace("if __name__", "print('imported', flush=True)\nif __name__"))
    folder.mkdir()
    words = [sys.executable, str(script), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        parent.stdout.readline()
        time.sleep(wait)
        began = time.monotonic()
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=30)
        took = time.monotonic() - began
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1, errors
    assert took < 3
