"""The network's input, brought back to a later layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints.layers import from_columns, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import CHANNELS_LAST, Layout, Site
from esper.stacking import Stackable, linear


@register
class InputSkip(Blueprint, Stackable):
    """``s(h) = W x + b`` with the network's input ``x``, token by token where the site has tokens; ``W = b = 0``.

    Serves tokens where the network reads as many tokens, and features where it reads a plain vector.
    """

    name: ClassVar[str] = "input_skip"
    family: ClassVar[Family] = Family.SKIP
    layouts: ClassVar[frozenset[Layout]] = CHANNELS_LAST
    mixes_positions: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = True

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.weight = zeros(generator, site.width, site.input_shape[-1])
        self.bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(inputs, self.layout)
        return from_columns(linear(self.weight, columns, self.bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return site.width * (site.input_shape[-1] + 1)

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * site.width * site.input_shape[-1]

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and site.input_shape[:-1] == site.extent and len(site.input_shape) > 0
