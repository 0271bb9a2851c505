"""Local worker processes that compute shards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


# Training makes and drops large blocks of memory all the time. By default glibc returns each to the system and page
# faults it back in, a tenth of a worker's time; below these sizes, in bytes, it keeps them.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20)}


def use_one_thread() -> None:
    """Compute every sum in one thread: how several would share it, and so its rounding, depends on the machine."""
    torch.set_num_threads(1)


def _prepare() -> None:
    """Leave Ctrl-C to the parent, which ends the workers; the shards are the parallelism."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class LocalWorkers:
    """Maps a function over tasks in at most one process per core; in this process if there is but one.

    This process computes in one thread from then on, so that its results are the same on every machine too.
    """

    def __init__(self, most: int) -> None:
        use_one_thread()
        count = min(most, os.cpu_count() or 1)
        self._pool = None
        if count > 1:
            for name, value in _ALLOCATOR.items():
                os.environ.setdefault(name, value)  # read by a process as it starts
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_prepare)
            # The pool starts a process per task that finds no idle one. They inherit the block, so that Ctrl-C cannot
            # end them before they are prepared.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for _ in range(count):
                self._pool.submit(use_one_thread)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """The results, in the order of the tasks."""
        if self._pool is None:
            return [function(task) for task in tasks]
        return list(self._pool.map(function, tasks))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
