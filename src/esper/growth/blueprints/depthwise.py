"""A convolution of each channel by itself, then a mixture of channels."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.blueprints.layers import (
    TAPS,
    count_positions,
    from_columns,
    has_neighbours,
    lecun_normal,
    shift,
    to_columns,
    zeros,
)
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.stacking import linear


@register
class Depthwise(Blueprint):
    """``s(h) = W (k * h) + b``, ``k`` one 3x3 kernel per channel (3 on sequences); ``W = b = 0``.

    Beyond the edges lie zeros. No ReLU between: the host's own follows soon, and what ``k`` finds keeps its sign.
    """

    name: ClassVar[str] = "depthwise"
    family: ClassVar[Family] = Family.SPATIAL
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        taps = (TAPS,) * len(site.extent)
        self.kernel = lecun_normal(generator, site.width, *taps, fan_in=TAPS ** len(site.extent))
        self.pointwise = zeros(generator, site.width, site.width)
        self.bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self.layout is Layout.IMAGE:
            kernel = self.kernel[:, None]
            filtered = F.conv2d(features, kernel, padding=TAPS // 2, groups=kernel.shape[0])
            return F.conv2d(filtered, self.pointwise[:, :, None, None], self.bias)
        before, here, after = shift(to_columns(features, self.layout), count_positions(features, self.layout))
        left, centre, right = self.kernel.unsqueeze(-1).unbind(1)
        filtered = left * before + centre * here + right * after
        return from_columns(linear(self.pointwise, filtered, self.bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return TAPS ** len(site.extent) * site.width + site.width**2 + site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * (TAPS ** len(site.extent) * site.width + site.width**2)

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and has_neighbours(site)
