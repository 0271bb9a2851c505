"""Local worker processes that compute shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from esper.experiments.crew import Crew, exhausted

Task = TypeVar("Task")
Result = TypeVar("Result")
Message = TypeVar("Message")


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
        return _in_order(self.finished(function, tasks))

    def finished(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's index and result, as soon as it is known; raises as `map` does."""
        return self._computed(partial(_silent, function), tasks, _ignore)

    def heard(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> list[Result]:
        """The results of tasks that talk: ``hear`` is given what each yields, while it works; raises as `map` does."""
        return _in_order(self._computed(function, tasks, hear))

    def _computed(
        self,
        function: Callable[[Task], Generator[Any, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Any], None],
    ) -> Iterator[tuple[int, Result]]:
        if self._crew is not None:
            return self._crew.finished(function, tasks, hear)
        return ((index, exhausted(function(task), hear)) for index, task in enumerate(tasks))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._crew is not None:
            self._crew.end()


def _in_order(finished: Iterator[tuple[int, Result]]) -> list[Result]:
    return [result for _, result in sorted(finished, key=lambda one: one[0])]


def _silent(function: Callable[[Task], Result], task: Task) -> Generator[Any, None, Result]:
    """A task that yields nothing."""
    yield from ()
    return function(task)


def _ignore(_: Any) -> None:
    pass
