"""On which device a task is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from esper.errors import ConfigError, RunError
from esper.experiments.workers import Workers

CPU = "cpu"


class Placed(ABC):
    """A task that is computed on one device."""

    @property
    @abstractmethod
    def device(self) -> str:
        """As torch names it, where the task is computed."""


def usable_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: this machine has none.
    """
    known = devices_here()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not {str(device), f"{device.type}:{device.index or 0}"} & set(known):
        raise ConfigError(f"there is no device {name!r} on this machine: set devices to some of {', '.join(known)}")
    return device


def devices_here() -> tuple[str, ...]:
    """The names of all devices that this process can compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (CPU,)
    return (CPU, *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))


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
