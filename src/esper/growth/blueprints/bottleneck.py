"""A convolution over samples or pixels, on a quarter of the channels."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.blueprints.layers import (
    TAPS,
    count_positions,
    from_columns,
    gather_neighbours,
    has_neighbours,
    he_normal,
    to_columns,
    zeros,
)
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.stacking import linear

REDUCTION = 4
"""Channels of the site per channel of the convolution."""


@register
class Bottleneck(Blueprint):
    """``s(h) = W3 relu(W2 * relu(W1 h + b1) + b2) + b3``: ``W1`` to a quarter of the channels, ``*`` a 3x3 convolution
    there (3 on sequences), ``W3`` back; ``W3 = b3 = 0``.

    The residual block of He et al. 2016 (section 4.1), without its normalisations. Beyond the edges lie zeros.
    """

    name: ClassVar[str] = "bottleneck"
    family: ClassVar[Family] = Family.SPATIAL
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width, inner = site.width, self.inner_width(site)
        taps = (TAPS,) * len(site.extent)
        fan_in = inner * TAPS ** len(site.extent)
        self.reduce = he_normal(generator, inner, width, fan_in=width)
        self.reduce_bias = zeros(generator, inner)
        self.kernel = he_normal(generator, inner, *taps, inner, fan_in=fan_in)  # [out, taps..., in]
        self.bias = zeros(generator, inner)
        self.restore = zeros(generator, width, inner)
        self.restore_bias = zeros(generator, width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self.layout is Layout.IMAGE:
            hidden = F.conv2d(features, self.reduce[:, :, None, None], self.reduce_bias).relu()
            hidden = F.conv2d(hidden, self.kernel.permute(0, 3, 1, 2), self.bias, padding=TAPS // 2).relu()
            return F.conv2d(hidden, self.restore[:, :, None, None], self.restore_bias)
        hidden = linear(self.reduce, to_columns(features, self.layout), self.reduce_bias).relu()
        around = gather_neighbours(hidden, count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(1), around, self.bias).relu()
        return from_columns(linear(self.restore, hidden, self.restore_bias), features, self.layout)

    @staticmethod
    def inner_width(site: Site) -> int:
        """A quarter of the channels, at least one."""
        return max(1, site.width // REDUCTION)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        width, inner = site.width, cls.inner_width(site)
        return 2 * inner * width + TAPS ** len(site.extent) * inner**2 + 2 * inner + width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        width, inner = site.width, cls.inner_width(site)
        return 2 * site.positions * (2 * inner * width + TAPS ** len(site.extent) * inner**2)

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and has_neighbours(site)
