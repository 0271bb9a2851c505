"""A two-layer perceptron at each position."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints.layers import from_columns, he_normal, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import CHANNELS_LAST, Layout, Site
from esper.stacking import Stackable, linear


@register
class Mlp(Blueprint, Stackable):
    """``s(h) = W2 relu(W1 h + b1) + b2`` at each position; ``W2 = b2 = 0``. ``expansion`` times the width inside."""

    name: ClassVar[str] = "mlp"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = CHANNELS_LAST
    mixes_positions: ClassVar[bool] = False
    expansion: ClassVar[int] = 2

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden = self.expansion * site.width
        self.inner = he_normal(generator, hidden, site.width, fan_in=site.width)
        self.inner_bias = zeros(generator, hidden)
        self.outer = zeros(generator, site.width, hidden)
        self.outer_bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(features, self.layout)
        hidden = linear(self.inner, columns, self.inner_bias).relu()
        return from_columns(linear(self.outer, hidden, self.outer_bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        hidden = cls.expansion * site.width
        return 2 * hidden * site.width + hidden + site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 4 * site.positions * cls.expansion * site.width**2
