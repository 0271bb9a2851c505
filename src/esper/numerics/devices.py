"""The devices of this machine, how this process computes on them, and tensors between them and the CPU.

To read a tensor, the CPU waits until its device has finished all earlier work. So measurements return their results as
`Deferred`, and several results can be fetched together with a single wait.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor

from esper import __version__
from esper.errors import ConfigError
from esper.numerics.arrays import Floats

CPU = "cpu"
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable by which cuBLAS sizes its workspaces; it is read once, when CUDA is first used."""
FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Sizes with which cuBLAS sums in the same order every time, the faster one first."""


def _check_name(name: str) -> str:
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise ValueError(f"'{name}' is not a torch device") from error


DeviceName = Annotated[str, AfterValidator(_check_name)]
"""Type of a setting: the name of a device that torch supports, whether or not this machine has one."""


def list_devices() -> tuple[str, ...]:
    """The names of all devices that this process can compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (CPU,)
    return (CPU, *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))


def require_device(name: str) -> torch.device:
    """The device of this name."""
    devices = list_devices()
    try:
        device = torch.device(name)
    except RuntimeError:  # torch supports no such device
        device = None
    # "cuda" is the device "cuda:0".
    if device is None or not {str(device), f"{device.type}:{device.index or 0}"} & set(devices):
        raise ConfigError(f"there is no device {name!r} on this machine: choose from {', '.join(devices)}")
    return device


def describe_platform(devices: Iterable[str]) -> dict[str, str]:
    """What results depend on besides settings and seeds: versions, operating system, and devices with their models."""
    count = torch.cuda.device_count()
    models = {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(count)}
    models["cuda"] = models.get("cuda:0", "")
    # A device of another machine, on which workers compute, has no model here.
    named = [f"{device} ({models[device]})" if models.get(device) else device for device in sorted(devices)]
    return {
        "esper": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "devices": ", ".join(named),
    }


def prepare_device(name: str, *, deterministic: bool) -> torch.device:
    """The device of this name, prepared for all that this process computes from now on.

    A CUDA device becomes the process's current one, so that nothing opens a context on another. Products of matrices
    and LSTMs are in full float32 there: the policy's probabilities must be the same when it acts and when it learns.
    Nothing changes for the CPU, where equal operations have equal bits.

    Args:
        name: As torch names it.
        deterministic: Whether the same program has the same bits every time: kernels that sum in a fixed order, and
            convolutions in full float32. Otherwise torch takes the fastest kernels, with TF32 in convolutions.
    """
    device = require_device(name)
    if device.type == CPU:
        return device
    if device.type == "cuda":
        if deterministic:
            _fix_workspace()
        cudnn: Any = torch.backends.cudnn  # its attributes are made at run time
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        cudnn.rnn.fp32_precision = "ieee"
        cudnn.conv.fp32_precision = "ieee" if deterministic else "tf32"
        cudnn.benchmark = not deterministic  # it chooses among kernels by their times
    torch.use_deterministic_algorithms(deterministic)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # all memory is written before it is read
    torch.accelerator.set_device_index(device.index or 0)
    return device


def _fix_workspace() -> None:
    """Let cuBLAS sum in a fixed order."""
    chosen, fixed = os.environ.get(CUBLAS_WORKSPACE), FIXED_WORKSPACES[0]
    if chosen is None and torch.cuda.is_initialized():
        raise ConfigError(
            f"this process has used CUDA before, and perhaps cuBLAS without {CUBLAS_WORKSPACE}: set that to "
            f"{fixed} in the environment before it starts, or set deterministic=false"
        )
    if chosen is not None and chosen not in FIXED_WORKSPACES:
        raise ConfigError(
            f"with {CUBLAS_WORKSPACE}={chosen} cuBLAS is not deterministic: set it to {fixed}, or set "
            "deterministic=false"
        )
    os.environ[CUBLAS_WORKSPACE] = chosen or fixed


T = TypeVar("T", covariant=True)
U = TypeVar("U")


@dataclass(frozen=True)
class Deferred(Generic[T]):
    """A result that is available once its tensors have been copied from their device."""

    tensors: Sequence[Tensor]
    """All of one type, on one device."""
    convert: Callable[..., T]
    """What they mean: a function of them as float64 arrays on the CPU, in the same order."""

    def combine(self, other: Deferred[U]) -> Deferred[tuple[T, U]]:
        """Both results, fetched together."""
        own = len(self.tensors)

        def both(*arrays: Floats) -> tuple[T, U]:
            return self.convert(*arrays[:own]), other.convert(*arrays[own:])

        return Deferred([*self.tensors, *other.tensors], both)

    def fetch(self) -> T:
        """The result, for which the CPU waits once for the device, and not at all without tensors."""
        return self.convert(*(to_arrays(*self.tensors) if self.tensors else ()))


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one type and device on another device, by one copy; the same tensors if they are there already.

    The CPU only waits for a copy that it is to have.
    """
    source = tensors[0].device
    if source == device:
        return list(tensors)
    packed = torch.cat([tensor.flatten() for tensor in tensors]).to(device, non_blocking=source.type == "cpu")
    return _split(packed, tensors)


def to_arrays(*tensors: Tensor) -> list[Floats]:
    """Tensors of one type as float64 arrays on the CPU, which waits for their device once."""
    packed = torch.cat([tensor.detach().flatten() for tensor in tensors]).to("cpu", torch.float64)
    return [part.numpy() for part in _split(packed, tensors)]


def _split(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts: Sequence[Tensor] = torch.split_with_sizes(packed, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
