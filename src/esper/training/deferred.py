"""Figures that a device may still be computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
T = TypeVar("T", covariant=True)
U = TypeVar("U")


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A result that is known once its figures have come from their device."""

    figures: Sequence[Tensor]
    """Of one type, on one device."""
    meaning: Callable[..., T]
    """Of the figures as float64 arrays on the CPU, in the same order."""

    def beside(self, other: Pending[U]) -> Pending[tuple[T, U]]:
        """Both results, fetched together."""
        own = len(self.figures)

        def both(*arrays: Floats) -> tuple[T, U]:
            return self.meaning(*arrays[:own]), other.meaning(*arrays[own:])

        return Pending([*self.figures, *other.figures], both)

    def fetch(self) -> T:
        """The result, for which the CPU waits once for the device, and not at all without figures."""
        return self.meaning(*(as_arrays(*self.figures) if self.figures else ()))


def at_once(result: U) -> Pending[U]:
    """What is known already."""

    def known(*_: Any) -> U:
        return result

    return Pending((), known)


def as_arrays(*tensors: Tensor) -> list[Floats]:
    """Tensors of one type as float64 arrays on the CPU, which waits for their device once."""
    packed = torch.cat([tensor.detach().flatten() for tensor in tensors]).to("cpu", torch.float64)
    parts: Sequence[Tensor] = torch.split_with_sizes(packed, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]
