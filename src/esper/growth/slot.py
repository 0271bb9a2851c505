"""A growth slot: an `nn.Module` instance registered as forward hook of a host's submodule.

A module instance, not a closure: it deep-copies, pickles and compiles with the host. The host itself stays untouched.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from esper.growth.site import Site


class Occupant(Protocol):
    """Whatever lives in a slot: it sees the host's features and the network's input and returns new features."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor: ...


class InputTap(nn.Module):
    """Forward pre-hook of the host that remembers the network's input, for seeds that read it.

    The input is held from one host forward to the next; `clear` lets go of it, and copies do not carry it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inputs: Tensor | None = None

    def forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._inputs = cast(Tensor, arguments[0])

    @property
    def inputs(self) -> Tensor:
        """The input of the forward pass now under way."""
        if self._inputs is None:
            raise RuntimeError("the host has not been called yet")
        return self._inputs

    def clear(self) -> None:
        self._inputs = None

    def __getstate__(self) -> dict[str, Any]:
        # Part of an autograd graph it could be neither copied nor pickled; otherwise it would store a batch of data.
        return {**self.__dict__, "_inputs": None}


class Slot(nn.Module):
    """One place where a host may grow. Dormant (no occupant) it returns the host's features as they are."""

    def __init__(self, name: str, site: Site, tap: InputTap) -> None:
        super().__init__()
        self.name = name
        self.site = site
        self.tap = tap
        self.occupant: Occupant | None = None

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        if self.occupant is None:
            return output
        return self.occupant(output, self.tap.inputs)
