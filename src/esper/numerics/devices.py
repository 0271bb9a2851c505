"""The devices of this machine, by torch's names."""

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
"""Type of a setting: the name of a device that torch supports, whether or not this machine has one."""


def require_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: this machine has no such device.
    """
    devices = list_devices()
    try:
        device = torch.device(name)
    except RuntimeError:  # torch supports no such device
        device = None
    # "cuda" is the device "cuda:0".
    if device is None or not {str(device), f"{device.type}:{device.index or 0}"} & set(devices):
        raise ConfigError(f"there is no device {name!r} on this machine: choose from {', '.join(devices)}")
    return device


def list_devices() -> tuple[str, ...]:
    """The names of all devices that this process can compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (CPU,)
    return (CPU, *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))
