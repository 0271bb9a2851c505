"""The site of a slot: layout and size of the features there, and the layer that computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

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
"""Layouts whose channels are the last axis; in the others, channels follow the batch."""

IN_ORDER = frozenset({Layout.TOKENS, Layout.SEQUENCE})
"""Layouts with an ordered axis of positions, in which examples of different lengths are padded."""


WideLayer = nn.Linear | nn.Conv1d | nn.Conv2d
"""A layer that can get more outputs or inputs."""


def find_channel_axis(layer: WideLayer) -> int:
    """The axis of the channels in a layer's input and output."""
    return -1 if isinstance(layer, nn.Linear) else 1


@dataclass(frozen=True, eq=False)
class Hidden:
    """Hidden units between two layers of a host, to which others can be added."""

    names: tuple[str, ...]
    """Names of the first layer, of the modules between in the order of their calls, and of the last layer."""
    first: WideLayer
    """The layer that computes the units."""
    between: tuple[nn.Module, ...]
    """Modules that act on each unit alone."""
    last: WideLayer
    """The layer that takes the units as input."""
    positions: int
    """Number of positions of one example at which the units exist: tokens, samples or pixels; 1 for plain features."""
    input_shape: tuple[int, ...]
    """Shape of the input of ``first``, for one example."""

    @property
    def width(self) -> int:
        """Number of units."""
        return self.first.weight.shape[0]

    def find_in(self, host: nn.Module) -> Hidden:
        """The units in a host of the same architecture, which may be narrower."""
        first, *between, last = map(host.get_submodule, self.names)
        first, last, shape = cast("WideLayer", first), cast("WideLayer", last), list(self.input_shape)
        shape[-1 if isinstance(first, nn.Linear) else 0] = first.weight.shape[1]
        return replace(self, first=first, between=tuple(between), last=last, input_shape=tuple(shape))


@dataclass(frozen=True, eq=False)
class Layer:
    """A module of a host that a slot follows."""

    module: nn.Module
    flops: int
    """FLOPs of the layer's forward pass for one example, of all operations that could be counted."""
    keeps_shape: bool
    """Whether the layer returns features with the shape and dtype of its first argument, as a block does."""
    like: Tensor
    """A scalar with the dtype and device for seeds after the layer."""
    trainable: frozenset[str]
    """Names of the parameters that required a gradient at the probe; they may be frozen since."""
    branch_outputs: tuple[str, ...] = ()
    """Names of the parameters that end the layer's branches: if they are zero, it returns its first argument. Empty if
    there are none or no available blueprint needs them."""
    unaltered: bool = True
    """False for a linear layer or a convolution that a hook or its own ``forward`` lets return something else."""
    in_tuple: bool = False
    """Whether the layer returns a tuple whose first element is the features."""

    @property
    def quantised(self) -> bool:
        """Whether the layer has integer parameters, which cannot learn."""
        return not all(values.is_floating_point() or values.is_complex() for values in self.module.parameters())


@dataclass(frozen=True)
class Site:
    """The features at one slot, as found by a probe forward pass.

    ``width`` is the number of channels (the last axis of features and tokens, axis 1 of sequences and images).
    ``extent`` is the shape without batch and channels. ``input_shape`` is the shape of one network input, without
    batch; it is empty if the input consists of indices.
    """

    layout: Layout
    width: int
    extent: tuple[int, ...]
    input_shape: tuple[int, ...]
    causal: bool = False
    """Whether no position may depend on later ones, as in a language model."""
    layer: Layer | None = field(default=None, compare=False, repr=False)
    """The layer that returns the features, for blueprints that are made for it; None in populations."""
    hidden: Hidden | None = field(default=None, compare=False, repr=False)
    """The hidden units that this layer takes as input, if the slot was attached to several modules."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example's features."""
        return (*self.extent, self.width) if self.layout in CHANNELS_LAST else (self.width, *self.extent)

    @property
    def positions(self) -> int:
        """Number of channel vectors of one example: tokens, samples or pixels; 1 for plain features."""
        return math.prod(self.extent)

    def find_in(self, host: nn.Module, width: int) -> Site:
        """The site in a host of the same architecture, with ``width`` channels here and perhaps fewer elsewhere."""
        return replace(self, width=width, hidden=None if self.hidden is None else self.hidden.find_in(host))

    @property
    def sizes(self) -> tuple[int, ...]:
        """What distinguishes sites of `find_in`: the width, and the numbers of hidden units and their inputs."""
        return (self.width,) if self.hidden is None else (self.width, *self.hidden.first.weight.shape[:2])
