"""Workers compute tasks: here those of this machine, and what all kinds of them have in common.

A task is a pure function of its argument, so it does not matter who computes it, or how often: every kind of workers
gives the same results.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from esper.experiments.crew import Crew, exhausted
from esper.experiments.process import prepare_process

Task = TypeVar("Task")
Result = TypeVar("Result")
Message = TypeVar("Message")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Shared(Protocol[T_co]):
    """A value that many tasks hold, and that reaches each place where they are computed once."""

    def get(self) -> T_co:
        """The value, for reading."""
        ...


@dataclass(frozen=True)
class Given(Generic[T]):
    """A shared value that every task carries with it."""

    value: T

    def get(self) -> T:
        """The value."""
        return self.value


class Workers(Protocol):
    """Compute tasks, in whatever processes there are; use them as a context manager.

    Functions and tasks have to be picklable. Leaving the context ends the processes at once, whatever they are doing.
    """

    @abstractmethod
    def computed(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> Iterator[tuple[int, Result]]:
        """Each task's index and result, as soon as it is known.

        ``hear`` is given what each task yields, in its order and once, while it goes on. The iterator may be given up
        half-way.

        Raises:
            RunError: a worker process died. What a task raises is raised here, too.
        """
        ...

    @abstractmethod
    def share(self, value: T) -> Shared[T]:
        """The value, to be put into many tasks; it must not change before they are done."""
        ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __enter__(self) -> Self:
        return self

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """The results, in the order of the tasks; raises as `computed` does."""
        return _in_order(self.finished(function, tasks))

    def finished(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's index and result, as soon as it is known; raises as `computed` does."""
        return self.computed(partial(_silent, function), tasks, _ignore)

    def heard(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> list[Result]:
        """The results, in the order of tasks that talk; hears and raises as `computed` does."""
        return _in_order(self.computed(function, tasks, hear))


class LocalWorkers(Workers):
    """Computes tasks in at most one process per core; in this process if there is but one.

    This process computes in one thread from then on, so that its results are the same on every machine too.
    """

    def __init__(self, most: int) -> None:
        prepare_process()
        count = min(most, os.cpu_count() or 1)
        self._crew = None
        if count > 1:
            self._crew = Crew(count, prepare_process)

    def computed(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> Iterator[tuple[int, Result]]:
        """As the protocol says."""
        if self._crew is not None:
            return self._crew.finished(function, tasks, hear)
        return ((index, exhausted(function(task), hear)) for index, task in enumerate(tasks))

    def share(self, value: T) -> Given[T]:
        """As it is."""
        return Given(value)

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
