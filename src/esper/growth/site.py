"""Where a slot sits: the layout and size of the features that pass there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


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


@dataclass(frozen=True)
class Site:
    """The features at one slot, as a probe forward saw them.

    ``width`` counts channels (the last axis of features and tokens, axis 1 of sequences and images), ``extent`` is
    what remains of the shape without batch and channels, ``input_shape`` the shape of one network input, without batch.
    """

    layout: Layout
    width: int
    extent: tuple[int, ...]
    input_shape: tuple[int, ...]

    @property
    def positions(self) -> int:
        """How many channel vectors one example has here: tokens, samples or pixels; 1 for plain features."""
        return math.prod(self.extent)

    def narrowed(self, width: int) -> Site:
        """The same site in a network that has ``width`` channels here."""
        return replace(self, width=width)
