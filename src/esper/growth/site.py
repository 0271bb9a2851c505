"""The site of a slot: layout and size of the features there, and the layer that makes them."""

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
class Step:
    """What a host does to hidden units, to each by itself: a module of its, or a function as a module."""

    module: nn.Module
    name: str = ""
    """Name of the module in the host; empty for a function."""


@dataclass(frozen=True, eq=False)
class Hidden:
    """Hidden units of a host, which some layers make and one layer reads, and to which others can be added.

    One layer makes them, or two of which the outputs are multiplied, as in a gated MLP.
    """

    names: tuple[str, ...]
    """Names of the layers that make them."""
    layers: tuple[nn.Module, ...]
    """These layers; all have the same input."""
    reader_name: str
    """Name of the layer that reads them."""
    reader: nn.Module
    """This layer."""
    steps: tuple[tuple[Step, ...], ...]
    """What follows each layer, before any product."""
    after: tuple[Step, ...]
    """What follows the product; empty if there is one layer."""
    width: int
    """Number of units."""
    positions: int
    """Positions for which a layer makes them, of one example: tokens, samples or pixels; 1 for plain features."""
    input_shape: tuple[int, ...]
    """Shape of what the layers that make them read, of one example."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of a host that a slot follows."""

    module: nn.Module
    flops: int
    """FLOPs of its forward pass for one example, of all that could be counted."""
    keeps_shape: bool
    """Whether it returns features of the shape and type of its first argument, as a block does."""
    single_argument: bool
    """Whether all its arguments but the first are None or False."""
    anchor: Tensor
    """A scalar with the type and the device for what grows behind it."""
    trainable: frozenset[str]
    """Names of its parameters that required a gradient when it was probed; it may be frozen since."""
    branch_outputs: tuple[str, ...] = ()
    """Names of the parameters that end its branches: if they are zero, it returns its first argument. Empty, if there
    are none or no blueprint on offer needs them."""
    unaltered: bool = True
    """False for a linear layer or a convolution whose output is not what its class computes, since a hook on it or a
    ``forward`` of the instance changes it; True for all other modules."""
    in_tuple: bool = False
    """Whether it returns a tuple that begins with the features."""
    blank: nn.Module | None = None
    """A copy from before the module was sharded, without values; None if it is whole."""

    @property
    def quantised(self) -> bool:
        """Whether it has parameters of whole numbers, which cannot learn."""
        return not all(values.is_floating_point() or values.is_complex() for values in self.module.parameters())


@dataclass(frozen=True)
class Site:
    """The features at one slot, as found by a probe forward pass.

    ``width`` counts channels (the last axis of features and tokens, axis 1 of sequences and images), ``extent`` is
    what remains of the shape without batch and channels, ``input_shape`` the shape of one network input, without batch;
    empty if that holds indices.
    """

    layout: Layout
    width: int
    extent: tuple[int, ...]
    input_shape: tuple[int, ...]
    causal: bool = False
    """Whether no position may depend on later ones, as in a language model."""
    apart: str = ""
    """Why no position may depend on any other, as a clause (``padding is masked``); empty if positions may mix."""
    layer: Layer | None = field(default=None, compare=False, repr=False)
    """The layer whose output the features are, for blueprints that are made for it; None in populations."""
    hidden: Hidden | None = field(default=None, compare=False, repr=False)
    """The hidden units that this layer reads, if the slot was attached to more layers than this one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return (*self.extent, self.width) if self.layout in CHANNELS_LAST else (self.width, *self.extent)

    @property
    def positions(self) -> int:
        """Number of channel vectors of one example: tokens, samples or pixels; 1 for plain features."""
        return math.prod(self.extent)

    def with_width(self, width: int) -> Site:
        """The site of a network with ``width`` channels here."""
        return replace(self, width=width)
