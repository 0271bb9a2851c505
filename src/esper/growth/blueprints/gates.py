"""Blueprints that rescale channels by what all positions show."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from esper.growth.blueprints.layers import count_positions, from_columns, he_normal, split_positions, to_columns, zeros
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.numerics.stacking import Stackable, linear

HIDDEN = 4
"""A gate's units between the mean over positions and the gate."""
REDUCTION = 4
"""Channels per hidden unit of squeeze-and-excitation; Hu et al. 2018 use 16 in networks of hundreds of channels."""


@register
class Gate(Blueprint, Stackable):
    """``s(h) = h * (2 sigmoid(f(m)) - 1)``, ``m`` the mean of ``h`` over positions: ``h + s(h)`` is h gated in (0, 2).

    ``f(m) = W2 relu(W1 m + b1) + b2`` with ``W2 = b2 = 0``: squeeze-and-excitation (Hu et al. 2018) that starts at one.
    """

    name: ClassVar[str] = "gate"
    family: ClassVar[Family] = Family.GATE
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden = self.hidden_at(site)
        self.squeeze = he_normal(generator, hidden, site.width, fan_in=site.width)
        self.squeeze_bias = zeros(generator, hidden)
        self.excite = zeros(generator, site.width, hidden)
        self.excite_bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = split_positions(
            to_columns(features, self.layout), count_positions(features, self.layout)
        )  # [..., C, P, B]
        hidden = linear(self.squeeze, columns.mean(-2), self.squeeze_bias).relu()
        # 2 sigmoid(x) - 1 = tanh(x / 2)
        gate = torch.tanh(0.5 * linear(self.excite, hidden, self.excite_bias))  # [..., C, B]
        return from_columns((columns * gate.unsqueeze(-2)).flatten(-2), features, self.layout)

    @classmethod
    def hidden_at(cls, site: Site) -> int:  # noqa: ARG003 (other gates look at it)
        """Hidden units."""
        return HIDDEN

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return 2 * cls.hidden_at(site) * site.width + cls.hidden_at(site) + site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 4 * cls.hidden_at(site) * site.width + 2 * site.positions * site.width


@register
class SqueezeExcite(Gate):
    """`Gate` on samples or pixels whose hidden units grow with the channels, as in its paper."""

    name: ClassVar[str] = "squeeze_excite"
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    @classmethod
    def hidden_at(cls, site: Site) -> int:
        return max(1, site.width // REDUCTION)
