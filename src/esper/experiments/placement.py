"""On which device a task is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from esper.devices import CPU, usable_device
from esper.errors import RunError
from esper.experiments.workers import Workers


class Placed(ABC):
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
            "the device's memory ran out: set networks_per_pass to some of the networks, or lower environments "
            "(`esper doctor` tells how many fit)"
        ) from error


def require_devices(names: Iterable[str], workers: Workers) -> None:
    """Have those who will compute on these devices look whether they have them.

    Raises:
        ConfigError: one of them is missing.
    """
    workers.map(_look, [_Look(name) for name in sorted(set(names) - {CPU})])


@dataclass(frozen=True)
class _Look(Placed):
    """A task that finds out whether a device is there."""

    name: str

    @property
    def device(self) -> str:
        return self.name


def _look(task: _Look) -> None:
    usable_device(task.device)
