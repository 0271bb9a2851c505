"""Processes that compute tasks for this one, and that end with it or with its interest in them.

Instead of `concurrent.futures`, which promises none of this: tasks are heard, in order, while they go on; a killed
worker is one sentence; Ctrl-C ends all of them at once, and so does the end of a parent that is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import platform
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
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


@dataclass(frozen=True)
class _Member:
    process: SpawnProcess
    connection: Connection[Any, Any]

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> tuple[int, int, Word]:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _died(self) -> RunError:
        self.process.join(1)
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return RunError(
            f"a worker process ended unexpectedly ({how}), perhaps for want of memory: free some and run it again "
            "(training goes on with --resume), or lower `environments` or `shards`"
        )


class ProcessPool:
    """Processes that compute tasks, as many at a time as there are members, until it is ended."""

    def __init__(self, size: int, prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []
        self._call = 0
        self._idle: list[_Member] = []
        self.end = weakref.finalize(self, _end, self._members)
        """Ends all members at once, whatever they are doing."""
        atexit.register(self.end)  # runs before multiprocessing's own, which would wait for them
        # They inherit the block, so that a signal sent to the whole group cannot end them before they ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for _ in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, prepare), daemon=True)
                process.start()
                theirs.close()  # the member alone holds it now, so its death is seen here
                self._members.append(_Member(process, ours))
        finally:
            self._idle = self._members.copy()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def finished(
        self,
        function: Callable[[Task], Generator[Any, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Any], None],
    ) -> Iterator[tuple[int, Result]]:
        """Each task's index and result as soon as it is known; a call given up half-way does not disturb the next.

        What a task yields is heard, in its order, while it goes on.

        Raises:
            RunError: a member died. What a task raises is raised here, too.
        """
        self._call += 1
        call, waiting, missing = self._call, deque(enumerate(tasks)), len(tasks)
        while missing:
            while waiting and self._idle:
                index, task = waiting.popleft()
                self._idle[-1].send((call, index, function, task))
                self._idle.pop()
            for member in self._ready():
                asked, index, word = member.receive()
                if not isinstance(word, Said):
                    self._idle.append(member)
                if asked != call:
                    continue
                match word:
                    case Said(what):
                        hear(what)
                    case Finished(result):
                        missing -= 1
                        yield index, result
                    case Failed(error):
                        raise error

    def _ready(self) -> list[_Member]:
        """Busy members that have something to say, of which there is one in the end."""
        busy = {member.connection: member for member in self._members if member not in self._idle}
        return [busy[connection] for connection in wait(list(busy)) if isinstance(connection, Connection)]


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


def _end(members: list[_Member]) -> None:
    for member in members:
        member.process.kill()  # they keep nothing, and ignore anything milder
    for member in members:
        member.process.join()
        member.connection.close()


def _serve(connection: Connection[Any, Any], prepare: Callable[[], None]) -> None:
    """A member's life."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare()
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
