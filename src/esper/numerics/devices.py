"""The devices of this machine, by the names that torch gives them."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import AfterValidator

from esper.errors import ConfigError

CPU = "cpu"


def _check_name(name: str) -> str:
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise ValueError(f"torch knows no device '{name}'") from error


DeviceName = Annotated[str, AfterValidator(_check_name)]
"""A setting: a device by a name that torch knows, whether or not this machine has it."""


def require_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: this machine has none.
    """
    devices = list_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or not {str(device), f"{device.type}:{device.index or 0}"} & set(devices):
        raise ConfigError(f"there is no device {name!r} on this machine: choose from {', '.join(devices)}")
    return device


def list_devices() -> tuple[str, ...]:
    """The names of all devices that this process can compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (CPU,)
    return (CPU, *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))
