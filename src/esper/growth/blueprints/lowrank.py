"""A linear map of low rank."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints.layers import from_columns, lecun_normal, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import CHANNELS_LAST, Layout, Site
from esper.stacking import Stackable, linear


@register
class LowRank(Blueprint, Stackable):
    """``s(h) = U D h`` at each position, through a quarter of the width; ``U = 0``."""

    name: ClassVar[str] = "lowrank"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = CHANNELS_LAST
    mixes_positions: ClassVar[bool] = False

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        rank = self.rank_at(site)
        self.down = lecun_normal(generator, rank, site.width, fan_in=site.width)
        self.up = zeros(generator, site.width, rank)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(features, self.layout)
        return from_columns(linear(self.up, linear(self.down, columns)), features, self.layout)

    @staticmethod
    def rank_at(site: Site) -> int:
        """A quarter of the width, at least one."""
        return max(1, site.width // 4)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return 2 * cls.rank_at(site) * site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 4 * site.positions * cls.rank_at(site) * site.width
