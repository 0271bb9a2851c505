"""Local worker processes that compute shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import torch

from esper.experiments.crew import Crew

Task = TypeVar("Task")
Result = TypeVar("Result")


# Training makes and drops large blocks of memory all the time. By default glibc returns each to the system and page
# faults it back in, a tenth of a worker's time; below these sizes, in bytes, it keeps them.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20)}


def use_one_thread() -> None:
    """Compute every sum in one thread: how several would share it, and so its rounding, depends on the machine."""
    torch.set_num_threads(1)


class LocalWorkers:
    """Computes tasks in at most one process per core; in this process if there is but one.

    This process computes in one thread from then on, so that its results are the same on every machine too. Leaving the
    context ends the processes at once, whatever they are doing.
    """

    def __init__(self, most: int) -> None:
        use_one_thread()
        count = min(most, os.cpu_count() or 1)
        self._crew = None
        if count > 1:
            for name, value in _ALLOCATOR.items():
                os.environ.setdefault(name, value)  # read by a process as it starts
            self._crew = Crew(count, use_one_thread)

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """The results, in the order of the tasks.

        Raises:
            RunError: a worker process died.
        """
        results = dict(self.finished(function, tasks))
        return [results[index] for index in range(len(tasks))]

    def finished(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's index and result, as soon as it is known; raises as `map` does."""
        if self._crew is not None:
            return self._crew.finished(function, tasks)
        return ((index, function(task)) for index, task in enumerate(tasks))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._crew is not None:
            self._crew.end()
