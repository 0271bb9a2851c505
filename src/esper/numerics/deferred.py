"""Tensors between the CPU and a device: several in one copy, and results that the device may still be computing.

To read a tensor, the CPU waits until the device has finished all earlier work. So measurements return their results as
`Deferred`, and several results can be fetched together with a single wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from esper.numerics.arrays import Floats

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
    parts: Sequence[Tensor] = torch.split_with_sizes(packed, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_arrays(*tensors: Tensor) -> list[Floats]:
    """Tensors of one type as float64 arrays on the CPU, which waits for their device once."""
    packed = torch.cat([tensor.detach().flatten() for tensor in tensors]).to("cpu", torch.float64)
    parts: Sequence[Tensor] = torch.split_with_sizes(packed, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]
