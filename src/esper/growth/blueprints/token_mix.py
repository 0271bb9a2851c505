"""A learned mixture of tokens by position."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints import initial
from esper.growth.blueprints.columns import from_columns, linear, to_columns
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site


@register
class TokenMix(Blueprint):
    """``s(h) = relu(M h + b) W``: ``M [T, T]`` mixes tokens alike in every channel, ``W [C, C]`` channels; ``W = 0``.

    The token-mixing half of MLP-Mixer (Tolstikhin et al. 2021), with channels mixed after it.
    """

    name: ClassVar[str] = "token_mix"
    family: ClassVar[Family] = Family.TOKEN_FAR
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.TOKENS})
    live: Tensor

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        tokens, width = site.positions, site.width
        self.mixing = initial.before_relu(generator, tokens, tokens, fan_in=tokens)
        self.bias = initial.zeros(generator, tokens)
        self.outer = initial.zeros(generator, width, width)
        self.register_buffer("live", torch.ones(width, device=generator.device))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        tokens = to_columns(features, self.layout).transpose(0, 1)  # [T, C, B]
        # Without `live` the bias, which runs along tokens, would wake the padded channels.
        bias = torch.outer(self.bias, self.live)[:, :, None]
        mixed = (linear(self.mixing, tokens) + bias).relu().transpose(0, 1)
        return from_columns(linear(self.outer, mixed), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return site.positions**2 + site.positions + site.width**2

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * site.width * (site.positions + site.width)

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and site.positions > 1
