"""Where a slot sits: the layout and size of the features that pass there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import Tensor, nn


class Layout(StrEnum):
    """How the features at a site are arranged; B is the batch axis."""

    FEATURES = "features"
    """``[B, D]``."""
    TOKENS = "tokens"
    """``[B, T, D]``."""
    SEQUENCE = "sequence"
    """``[B, C, L]``."""
    IMAGE = "image"
    """``[B, C, H, W]``."""


CHANNELS_LAST = frozenset({Layout.FEATURES, Layout.TOKENS})
"""Layouts whose channels are the last axis; in the others they follow the batch."""

IN_ORDER = frozenset({Layout.TOKENS, Layout.SEQUENCE})
"""Layouts whose positions are in one order, so that examples of different lengths are padded."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of a host that a slot follows."""

    module: nn.Module
    flops: int | None
    """Of its forward pass for one example; None if torch cannot count them."""
    keeps_shape: bool
    """Whether it returns features of the shape and type of its first argument, as a block does."""
    alone: bool
    """Whether it has no other argument that says anything."""
    anchor: Tensor
    """Without values: of the type and on the device that what grows behind it is to have."""
    learning: frozenset[str]
    """Names of its parameters that learned when it was probed; it may be frozen since."""
    outputs: tuple[str, ...] = ()
    """Names of the parameters that end its branches: once they are zero it returns what it is given. Empty, if there
    are none or no blueprint on offer asks."""
    unaltered: bool = True
    """Whether an ordinary linear layer or convolution returned what its class makes of what it was called with, so that
    neither a hook on it nor a ``forward`` of the instance changes that; of all else nothing is said."""
    blank: nn.Module | None = None
    """The module as it was before it was sharded, without values; None where it is whole."""

    @property
    def quantised(self) -> bool:
        """Whether it has parameters of whole numbers, which cannot learn."""
        return any(not (one.is_floating_point() or one.is_complex()) for one in self.module.parameters())


@dataclass(frozen=True)
class Site:
    """The features at one slot, as a probe forward saw them.

    ``width`` counts channels (the last axis of features and tokens, axis 1 of sequences and images), ``extent`` is
    what remains of the shape without batch and channels, ``input_shape`` the shape of one network input, without batch;
    empty if the network reads indices.
    """

    layout: Layout
    width: int
    extent: tuple[int, ...]
    input_shape: tuple[int, ...]
    causal: bool = False
    """Whether no position may learn of later ones, as in a language model."""
    apart: str = ""
    """Why no position may learn of any other, as where padding is masked: a clause with a verb; empty if it may."""
    layer: Layer | None = field(default=None, compare=False, repr=False)
    """The layer that yields the features, for blueprints that are made for it; None in populations."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return (*self.extent, self.width) if self.layout in CHANNELS_LAST else (self.width, *self.extent)

    @property
    def positions(self) -> int:
        """How many channel vectors one example has here: tokens, samples or pixels; 1 for plain features."""
        return math.prod(self.extent)

    def with_width(self, width: int) -> Site:
        """The same site in a network that has ``width`` channels here."""
        return replace(self, width=width)
