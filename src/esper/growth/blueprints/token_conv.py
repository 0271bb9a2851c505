"""A convolution over tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
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
from esper.stacking import Stackable, linear


@register
class TokenConv(Blueprint, Stackable):
    """``s(h) = W2 relu(W1 * h + b1)``: ``*`` a convolution over three tokens, zero beyond the ends; ``W2 = 0``."""

    name: ClassVar[str] = "token_conv"
    family: ClassVar[Family] = Family.TOKEN_NEAR
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.TOKENS})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width = site.width
        self.kernel = he_normal(generator, width, TAPS, width, fan_in=TAPS * width)  # [out, tap, in]
        self.bias = zeros(generator, width)
        self.outer = zeros(generator, width, width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        around = gather_neighbours(to_columns(features, self.layout), count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(-2), around, self.bias).relu()
        return from_columns(linear(self.outer, hidden), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return (TAPS + 1) * site.width**2 + site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * (TAPS + 1) * site.width**2

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and has_neighbours(site)
