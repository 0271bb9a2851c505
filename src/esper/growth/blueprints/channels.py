"""Blueprints that act on channels: a norm, perceptrons, low-rank maps, a skip from the input, gates."""

import torch
from torch import Tensor

from esper.growth.blueprints.layers import (
    count_positions,
    from_columns,
    he_normal,
    lecun_normal,
    normalise,
    split_positions,
    to_columns,
    zeros,
)
from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Context, Family, register
from esper.growth.site import CHANNELS_LAST, Layout, Site
from esper.numerics.modules import Stackable, linear


@register
class Norm(Blueprint, Stackable):
    """``s(h) = gamma * normalise(h) + beta`` at each position; ``gamma = beta = 0``."""

    name, family, layouts = "norm", Family.NORM, frozenset(Layout)
    mixes_positions = False
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
    def cost_at(cls, site: Site) -> BlueprintCost:
        return BlueprintCost(2 * site.width, 0)  # all work is elementwise


@register
class Mlp(Blueprint, Stackable):
    """``s(h) = W2 relu(W1 h + b1) + b2`` at each position, with ``expansion * width`` hidden units; ``W2 = b2 = 0``."""

    name, family, layouts = "mlp", Family.CHANNEL, CHANNELS_LAST
    mixes_positions = False
    expansion = 2

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden = self.expansion * site.width
        self.inner = he_normal(generator, hidden, site.width, fan_in=site.width)
        self.inner_bias = zeros(generator, hidden)
        # The outer map gets a gradient at once, the inner one after a step.
        self.outer = zeros(generator, site.width, hidden)
        self.outer_bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(features, self.layout)
        hidden = linear(self.inner, columns, self.inner_bias).relu()
        return from_columns(linear(self.outer, hidden, self.outer_bias), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        hidden = cls.expansion * site.width
        weights = 2 * hidden * site.width
        return BlueprintCost(weights + hidden + site.width, 2 * site.positions * weights)


@register
class MlpWide(Mlp):
    """`Mlp` with four times the site's width in hidden units, as in a transformer block."""

    name = "mlp_wide"
    expansion = 4


@register
class Conv1x1(Mlp):
    """1x1 convolution, ReLU, 1x1 convolution: an `Mlp` with as many hidden units as the site has channels."""

    name, layouts = "conv1x1", frozenset({Layout.SEQUENCE, Layout.IMAGE})
    expansion = 1


@register
class LowRank(Blueprint, Stackable):
    """``s(h) = U D h`` at each position, with a quarter of the site's width as the rank; ``U = 0``."""

    name, family, layouts = "lowrank", Family.CHANNEL, CHANNELS_LAST
    mixes_positions = False

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
        """The rank at ``site``: a quarter of the width, at least 1."""
        return max(1, site.width // 4)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = 2 * cls.rank_at(site) * site.width
        return BlueprintCost(weights, 2 * site.positions * weights)


RANK = 8
"""Rank of `LowRank8`, unless the site's width is smaller."""


@register
class LowRank8(LowRank):
    """`LowRank` on tokens, with a rank of 8 whatever the width."""

    name, layouts = "lowrank_8", frozenset({Layout.TOKENS})

    @staticmethod
    def rank_at(site: Site) -> int:
        return min(RANK, site.width)


@register
class InputSkip(Blueprint, Stackable):
    """``s(h) = W x + b`` with the network's input ``x``, token by token where the site has tokens; ``W = b = 0``.

    Tokens are supported if the network's input has as many of them, plain features if it is a plain vector.
    """

    name, family, layouts = "input_skip", Family.SKIP, CHANNELS_LAST
    mixes_positions = False
    context = Context.NETWORK

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.weight = zeros(generator, site.width, site.input_shape[-1])
        self.bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        columns = to_columns(inputs, self.layout)
        return from_columns(linear(self.weight, columns, self.bias), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = site.width * site.input_shape[-1]
        return BlueprintCost(weights + site.width, 2 * site.positions * weights)

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and site.input_shape[:-1] == site.extent and len(site.input_shape) > 0


HIDDEN = 4
"""Hidden units of a gate, between the mean over positions and the sigmoid."""
REDUCTION = 4
"""Channels per hidden unit of squeeze-and-excitation; Hu et al. 2018 use 16, with hundreds of channels."""


@register
class Gate(Blueprint, Stackable):
    """``s(h) = h * (2 sigmoid(f(m)) - 1)``, where ``m`` is the mean of ``h`` over positions.

    So ``h + s(h)`` is ``h`` times a gate in (0, 2). ``f(m) = W2 relu(W1 m + b1) + b2`` with ``W2 = b2 = 0``:
    squeeze-and-excitation (Hu et al. 2018) whose gates start at one.
    """

    name, family, layouts = "gate", Family.GATE, frozenset(Layout)

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden = self.hidden_at(site)
        self.squeeze = he_normal(generator, hidden, site.width, fan_in=site.width)
        self.squeeze_bias = zeros(generator, hidden)
        self.excite = zeros(generator, site.width, hidden)
        self.excite_bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        positions = count_positions(features, self.layout)
        columns = split_positions(to_columns(features, self.layout), positions)  # [..., C, P, B]
        hidden = linear(self.squeeze, columns.mean(-2), self.squeeze_bias).relu()
        # 2 sigmoid(x) - 1 = tanh(x / 2)
        gate = torch.tanh(0.5 * linear(self.excite, hidden, self.excite_bias))  # [..., C, B]
        return from_columns((columns * gate.unsqueeze(-2)).flatten(-2), features, self.layout)

    @classmethod
    def hidden_at(cls, site: Site) -> int:  # noqa: ARG003 (other gates need it)
        """Number of hidden units at ``site``."""
        return HIDDEN

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = 2 * cls.hidden_at(site) * site.width
        return BlueprintCost(weights + cls.hidden_at(site) + site.width, 2 * weights)


@register
class SqueezeExcite(Gate):
    """`Gate` on samples or pixels, with a number of hidden units proportional to the channels, as in the paper."""

    name, layouts = "squeeze_excite", frozenset({Layout.SEQUENCE, Layout.IMAGE})

    @classmethod
    def hidden_at(cls, site: Site) -> int:
        return max(1, site.width // REDUCTION)
