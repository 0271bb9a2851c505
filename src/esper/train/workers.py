"""Who computes tasks: processes of this machine or Ray, and on which device.

A task is a pure function of its argument, so it does not matter who computes it, or how often: every kind of workers
gives the same results.
"""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import torch
import tyro

from esper.errors import ConfigError, RunError
from esper.extras import require
from esper.numerics.devices import CPU, usable_device
from esper.train.process_pool import (
    Failed,
    Finished,
    Said,
    WorkerProcess,
    end_processes,
    prepare_process,
    run_task,
    start_processes,
)

Task = TypeVar("Task")
Result = TypeVar("Result")
Message = TypeVar("Message")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Shared(Generic[T_co]):
    """A value that many tasks hold; where they are computed elsewhere, it reaches each place once."""

    value: Any
    """Itself, or what stands for it there."""

    def get(self) -> T_co:
        """The value, for reading."""
        return self.value


class Workers(ABC):
    """Compute tasks, in whatever processes there are; use them as a context manager.

    Functions and tasks have to be picklable. Leaving the context ends the processes at once, whatever they are doing.
    """

    @abstractmethod
    def stream(
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

    @abstractmethod
    def share(self, value: T) -> Shared[T]:
        """The value, to be put into many tasks; it must not change before they are done."""

    @abstractmethod
    def end(self) -> None:
        """End the processes at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """The results, in the order of the tasks; raises as `stream` does."""
        return _in_order(self.as_completed(function, tasks))

    def as_completed(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's index and result, as soon as it is known; raises as `stream` does."""
        return self.stream(partial(_silent, function), tasks, _ignore)

    def gather(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> list[Result]:
        """The results, in the order of tasks that talk; hears and raises as `stream` does."""
        return _in_order(self.stream(function, tasks, hear))


class LocalWorkers(Workers):
    """Computes tasks in at most one process per core; in this process if there is but one.

    This process computes in one thread from then on, so that its results are the same on every machine too.
    """

    def __init__(self, most: int) -> None:
        prepare_process()
        count = min(most, os.cpu_count() or 1)
        self._processes = start_processes(count if count > 1 else 0)
        self._idle = self._processes.copy()
        self._call = 0
        self._end = weakref.finalize(self, end_processes, self._processes)
        atexit.register(self._end)  # runs before multiprocessing's own, which would wait for them

    def stream(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> Iterator[tuple[int, Result]]:
        """As in the base; a call that is given up half-way does not disturb the next."""
        if not self._processes:
            yield from ((index, run_task(function(task), hear)) for index, task in enumerate(tasks))
            return
        self._call += 1
        call, waiting, missing = self._call, deque(enumerate(tasks)), len(tasks)
        while missing:
            while waiting and self._idle:
                index, task = waiting.popleft()
                self._idle[-1].send((call, index, function, task))
                self._idle.pop()
            for process in self._wait():
                asked, index, word = process.receive()
                if not isinstance(word, Said):
                    self._idle.append(process)
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

    def share(self, value: T) -> Shared[T]:
        """As it is."""
        return Shared(value)

    def end(self) -> None:
        """End the processes at once, whatever they are doing."""
        self._end()

    def _wait(self) -> list[WorkerProcess]:
        """Busy processes that have something to say, of which there is one in the end."""
        busy = {process.connection: process for process in self._processes if process not in self._idle}
        return [busy[connection] for connection in wait(list(busy)) if isinstance(connection, Connection)]


def _in_order(finished: Iterator[tuple[int, Result]]) -> list[Result]:
    return [result for _, result in sorted(finished, key=lambda one: one[0])]


def _silent(function: Callable[[Task], Result], task: Task) -> Generator[Any, None, Result]:
    """A task that yields nothing."""
    yield from ()
    return function(task)


def _ignore(_: Any) -> None:
    pass


_TOLD = tyro.conf.arg(help_behavior_hint="")
"""An option whose own words tell what holds without it."""


@dataclass(frozen=True)
class Backend:
    """Who computes. It changes how long results take, and nothing else."""

    backend: Literal["local", "ray"] = "local"
    """Processes of this machine, or Ray (extra ``ray``)."""
    workers: Annotated[int | None, _TOLD] = None
    """Tasks computed at a time; by default all there are, on this machine at most one per core."""
    address: Annotated[str | None, _TOLD] = None
    """A Ray cluster to compute in, as host:port or "auto"; by default Ray is started here, and ended with the
    command."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: ask for at least 1")
        if self.address is not None and self.backend != "ray":
            raise ConfigError("--address is that of a Ray cluster: add --backend ray")
        if self.backend == "ray":
            require("ray", "--backend ray", "ray")

    def open(self, tasks: int) -> Workers:
        """Workers for that many tasks side by side; use them as a context manager.

        Raises:
            ConfigError: there is no such cluster.
            RunError: Ray cannot be started.
        """
        cores = tasks if self.address else os.cpu_count() or 1
        most = max(min(tasks, cores), 1) if self.workers is None else self.workers
        if self.backend == "local":
            return LocalWorkers(most)
        from esper.train.ray_workers import RayWorkers  # noqa: PLC0415 (an extra, and seconds to import)

        return RayWorkers(most, self.address)


Computing = Annotated[Backend, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
"""The type of a command's `--backend`, `--workers` and `--address`: `computing: Computing = LOCAL`."""
LOCAL = Backend()
"""Processes of this machine."""


class DeviceTask(ABC):
    """A task that is computed on one device."""

    @property
    @abstractmethod
    def device(self) -> str:
        """As torch names it, where the task is computed."""


@contextmanager
def enough_memory() -> Generator[None]:
    """Raises RunError, which says what helps, if a device's memory runs out meanwhile."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the device's memory ran out: set networks_per_pass to some of the networks, or lower environments"
        ) from error


def require_devices(names: Iterable[str], workers: Workers) -> None:
    """Have those who will compute on these devices look whether they have them.

    Raises:
        ConfigError: one of them is missing.
    """
    workers.map(_require_device, [_DeviceLook(name) for name in sorted(set(names) - {CPU})])


@dataclass(frozen=True)
class _DeviceLook(DeviceTask):
    name: str

    @property
    def device(self) -> str:
        return self.name


def _require_device(task: DeviceTask) -> None:
    usable_device(task.device)
