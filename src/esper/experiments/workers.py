"""Local worker processes that compute shards."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def _prepare() -> None:
    """Leave Ctrl-C to the parent, which ends the workers; one thread each, since the shards are the parallelism."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


class LocalWorkers:
    """Maps a function over tasks in at most one process per core; in this process if there is but one."""

    def __init__(self, most: int) -> None:
        count = min(most, os.cpu_count() or 1)
        self._pool = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_prepare)

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
