"""A convolution over samples or pixels."""

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


@register
class Conv3x3(Blueprint):
    """``s(h) = W2 relu(W1 * h + b1) + b2``, ``*`` a 3x3 convolution (3 on sequences); ``W2 = b2 = 0``.

    Beyond the edges lie zeros.
    """

    name: ClassVar[str] = "conv3x3"
    family: ClassVar[Family] = Family.SPATIAL
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width = site.width
        taps = (TAPS,) * len(site.extent)
        fan_in = width * TAPS ** len(site.extent)
        self.kernel = he_normal(generator, width, *taps, width, fan_in=fan_in)  # [out, taps..., in]
        self.bias = zeros(generator, width)
        self.outer = zeros(generator, width, width)
        self.outer_bias = zeros(generator, width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self.layout is Layout.IMAGE:
            kernel = self.kernel.permute(0, 3, 1, 2)
            hidden = F.conv2d(features, kernel, self.bias, padding=TAPS // 2).relu()
            return F.conv2d(hidden, self.outer[:, :, None, None], self.outer_bias)
        around = gather_neighbours(to_columns(features, self.layout), count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(1), around, self.bias).relu()
        return from_columns(linear(self.outer, hidden, self.outer_bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return (TAPS ** len(site.extent) + 1) * site.width**2 + 2 * site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * (TAPS ** len(site.extent) + 1) * site.width**2

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and has_neighbours(site)
