"""Normalised features."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints.layers import from_columns, normalise, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.stacking import Stackable


@register
class Norm(Blueprint, Stackable):
    """``s(h) = gamma * normalise(h) + beta`` at each position; ``gamma = beta = 0``."""

    name: ClassVar[str] = "norm"
    family: ClassVar[Family] = Family.NORM
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False
    live: Tensor

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.gamma = zeros(generator, site.width)
        self.beta = zeros(generator, site.width)
        self.register_buffer("live", torch.ones(site.width, device=generator.device))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(features, self.layout)
        gamma, beta = self.gamma.unsqueeze(-1), self.beta.unsqueeze(-1)
        scaled = torch.addcmul(beta, gamma, normalise(columns, self.live))
        return from_columns(scaled, features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return 2 * site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 6 * site.positions * site.width
