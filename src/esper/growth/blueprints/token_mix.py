"""A learned mixture of tokens by position."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.errors import SlotError
from esper.growth.blueprints.layers import from_columns, he_normal, split_positions, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.stacking import Stackable, linear


@register
class TokenMix(Blueprint, Stackable):
    """``s(h) = relu(M h + b) W``: ``M [T, T]`` mixes tokens alike in every channel, ``W [C, C]`` channels; ``W = 0``.

    The token-mixing half of MLP-Mixer (Tolstikhin et al. 2021), with channels mixed after it.
    """

    name: ClassVar[str] = "token_mix"
    family: ClassVar[Family] = Family.TOKEN_FAR
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.TOKENS})
    live: Tensor

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.positions = tokens = site.positions
        width = site.width
        self.mixing = he_normal(generator, tokens, tokens, fan_in=tokens)
        self.bias = zeros(generator, tokens)
        self.outer = zeros(generator, width, width)
        self.register_buffer("live", torch.ones(width, device=generator.device))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if features.shape[-2] != self.positions:
            raise SlotError(
                f"token_mix mixes {self.positions} tokens and was given {features.shape[-2]}: "
                "where their number varies, leave it out of the slot's blueprints"
            )
        columns = split_positions(to_columns(features, self.layout), self.positions)  # [..., C, T, B]
        tokens = columns.transpose(-3, -2).flatten(-2)  # [..., T, C * B]
        mixed = linear(self.mixing, tokens, self.bias).relu()
        columns = mixed.view(*mixed.shape[:-1], -1, columns.shape[-1]).transpose(-3, -2).flatten(-2)
        # Without `live`, what the bias, which runs along tokens, does to padded channels would reach their weights.
        return from_columns(linear(self.outer * self.live.unsqueeze(-2), columns), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return site.positions**2 + site.positions + site.width**2

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * site.width * (site.positions + site.width)

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and site.positions > 1
