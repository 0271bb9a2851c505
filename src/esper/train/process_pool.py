"""Tasks that talk while they go on, and processes that compute them, which end with this one.

Instead of `concurrent.futures`, which promises none of this: tasks are heard, in order, while they go on; a killed
worker is one sentence; Ctrl-C ends all of them at once, and so does the end of a parent that is killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch

from esper.errors import RunError

# Names and numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 * 2**20
_MAPPED_BYTES = 32 * 2**20
"""The largest that glibc allows."""


def prepare_process() -> None:
    """Compute every sum in one thread, and keep freed memory for the next step.

    How several threads would share a sum, and so its rounding, depends on the machine. And training makes and drops
    large blocks all the time: by default glibc returns each to the system and page faults it back in, which costs a
    tenth of the time of training, and a fifth of that of validation.
    """
    torch.set_num_threads(1)
    if platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@dataclass(frozen=True)
class Said:
    """The task goes on."""

    what: Any


@dataclass(frozen=True)
class Finished:
    """The task is done."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """The task raised this; a note tells where."""

    error: Exception


Word = Said | Finished | Failed


def stream_words(function: Callable[[Any], Generator[Any, None, Any]], task: Any) -> Generator[Word]:
    """All that the task says; the last word is its result or its error."""
    work = function(task)
    while True:
        try:
            said = next(work)
        except StopIteration as end:
            yield Finished(end.value)
            return
        except Exception as error:  # noqa: BLE001 (whatever it is, it is for the caller to handle)
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            yield Failed(error)
            return
        yield Said(said)


Task = TypeVar("Task")
Result = TypeVar("Result")
Message = TypeVar("Message")

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def run_task(task: Generator[Message, None, Result], hear: Callable[[Message], None]) -> Result:
    """What a task returns, after what it yields was heard; what hearing raises is raised in the task, too."""
    try:
        said = next(task)
        while True:
            try:
                hear(said)
            except BaseException as error:  # noqa: BLE001 (Ctrl-C too: the task may have something to save)
                said = task.throw(error)
            else:
                said = next(task)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class WorkerProcess:
    """A process that computes the tasks it is sent, one after the other, and ends with this one."""

    process: SpawnProcess
    connection: Connection[Any, Any]

    def send(self, message: Any) -> None:
        """Give it a call's number, a task's index, a function and the task; RunError if it died."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._explain_death() from error

    def receive(self) -> tuple[int, int, Word]:
        """The call's number, the task's index and what the task says next; RunError if it died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._explain_death() from error

    def _explain_death(self) -> RunError:
        self.process.join(1)
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return RunError(
            f"a worker process ended unexpectedly ({how}), perhaps for want of memory: free some and run it again "
            "(training goes on with --resume), or lower `environments` or `shards`"
        )


def start_processes(count: int) -> list[WorkerProcess]:
    """So many of them; Ctrl-C and SIGTERM are left to this process."""
    context = multiprocessing.get_context("spawn")
    started: list[WorkerProcess] = []
    # They inherit the block, so that a signal sent to the whole group cannot end them before they ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # the process alone holds it now, so its death is seen here
            started.append(WorkerProcess(process, ours))
    except BaseException:
        end_processes(started)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return started


def end_processes(workers: Sequence[WorkerProcess]) -> None:
    """End them at once, whatever they are doing."""
    for worker in workers:
        worker.process.kill()  # they keep nothing, and ignore anything milder
    for worker in workers:
        worker.process.join()
        worker.connection.close()


def _serve(connection: Connection[Any, Any]) -> None:
    """A worker's life."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare_process()
    while True:
        try:
            call, index, function, task = connection.recv()
        except EOFError:
            return
        for word in stream_words(function, task):
            connection.send((call, index, word))


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which might compute for long."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
