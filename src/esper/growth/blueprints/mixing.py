"""Blueprints that mix positions: neighbouring samples or pixels, and tokens by position or by content."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.errors import SlotError
from esper.growth.blueprints.layers import (
    TAPS,
    count_positions,
    from_columns,
    gather_neighbours,
    has_neighbours,
    he_normal,
    lecun_normal,
    normal,
    normalise,
    shift,
    split_positions,
    to_columns,
    zeros,
)
from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Family, register
from esper.growth.site import Layout, Site
from esper.numerics.modules import Stackable, linear


def count_taps(site: Site) -> int:
    """Number of kernel entries for each pair of channels: 9 on images, 3 on sequences."""
    return TAPS ** len(site.extent)


class Convolution(Blueprint):
    """Base class of blueprints with a zero-padded convolution."""

    family, layouts = Family.SPATIAL, frozenset({Layout.SEQUENCE, Layout.IMAGE})

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and has_neighbours(site)


@register
class Conv3x3(Convolution):
    """``s(h) = W2 relu(W1 * h + b1) + b2``, where ``*`` is a 3x3 convolution (3 on sequences); ``W2 = b2 = 0``."""

    name = "conv3x3"

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width = site.width
        taps = (TAPS,) * len(site.extent)
        fan_in = width * count_taps(site)
        self.kernel = he_normal(generator, width, *taps, width, fan_in=fan_in)  # [out, taps..., in]
        self.bias = zeros(generator, width)
        self.outer = zeros(generator, width, width)
        self.outer_bias = zeros(generator, width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        # Sequences, as columns, take one product with all neighbours.
        if self.layout is Layout.IMAGE:
            kernel = self.kernel.permute(0, 3, 1, 2)
            hidden = F.conv2d(features, kernel, self.bias, padding=TAPS // 2).relu()
            return F.conv2d(hidden, self.outer[:, :, None, None], self.outer_bias)
        around = gather_neighbours(to_columns(features, self.layout), count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(1), around, self.bias).relu()
        return from_columns(linear(self.outer, hidden, self.outer_bias), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = (count_taps(site) + 1) * site.width**2
        return BlueprintCost(weights + 2 * site.width, 2 * site.positions * weights)


@register
class Depthwise(Convolution):
    """``s(h) = W (k * h) + b``, where ``k`` has one 3x3 kernel per channel (3 on sequences); ``W = b = 0``.

    There is no ReLU in between, so the output of ``k`` keeps its sign; the host's own activation follows soon.
    """

    name = "depthwise"

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        taps = (TAPS,) * len(site.extent)
        self.kernel = lecun_normal(generator, site.width, *taps, fan_in=count_taps(site))
        self.pointwise = zeros(generator, site.width, site.width)
        self.bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        # Sequences, as columns, take one product per tap.
        if self.layout is Layout.IMAGE:
            kernel = self.kernel[:, None]
            filtered = F.conv2d(features, kernel, padding=TAPS // 2, groups=kernel.shape[0])
            return F.conv2d(filtered, self.pointwise[:, :, None, None], self.bias)
        before, here, after = shift(to_columns(features, self.layout), count_positions(features, self.layout))
        left, centre, right = self.kernel.unsqueeze(-1).unbind(1)
        filtered = left * before + centre * here + right * after
        return from_columns(linear(self.pointwise, filtered, self.bias), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = count_taps(site) * site.width + site.width**2
        return BlueprintCost(weights + site.width, 2 * site.positions * weights)


REDUCTION = 4
"""Ratio of the site's channels to those of a bottleneck's convolution."""


@register
class Bottleneck(Convolution):
    """``s(h) = W3 relu(W2 * relu(W1 h + b1) + b2) + b3``, where ``*`` is a 3x3 convolution; ``W3 = b3 = 0``.

    ``W1`` maps to a quarter of the channels, ``W2`` convolves these, and ``W3`` maps back: the residual block of He et
    al. 2016 (section 4.1), without its normalisations.
    """

    name = "bottleneck"

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width, inner = site.width, self.inner_width(site)
        taps = (TAPS,) * len(site.extent)
        fan_in = inner * count_taps(site)
        self.reduce = he_normal(generator, inner, width, fan_in=width)
        self.reduce_bias = zeros(generator, inner)
        self.kernel = he_normal(generator, inner, *taps, inner, fan_in=fan_in)  # [out, taps..., in]
        self.bias = zeros(generator, inner)
        self.restore = zeros(generator, width, inner)
        self.restore_bias = zeros(generator, width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self.layout is Layout.IMAGE:
            hidden = F.conv2d(features, self.reduce[:, :, None, None], self.reduce_bias).relu()
            hidden = F.conv2d(hidden, self.kernel.permute(0, 3, 1, 2), self.bias, padding=TAPS // 2).relu()
            return F.conv2d(hidden, self.restore[:, :, None, None], self.restore_bias)
        hidden = linear(self.reduce, to_columns(features, self.layout), self.reduce_bias).relu()
        around = gather_neighbours(hidden, count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(1), around, self.bias).relu()
        return from_columns(linear(self.restore, hidden, self.restore_bias), features, self.layout)

    @staticmethod
    def inner_width(site: Site) -> int:
        """Number of channels of the convolution at ``site``: a quarter of the site's, at least 1."""
        return max(1, site.width // REDUCTION)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        width, inner = site.width, cls.inner_width(site)
        weights = 2 * inner * width + count_taps(site) * inner**2
        return BlueprintCost(weights + 2 * inner + width, 2 * site.positions * weights)


class TokenMixer(Blueprint, Stackable):
    """Base class of blueprints that mix tokens; a site must have at least two tokens."""

    layouts = frozenset({Layout.TOKENS})

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and has_neighbours(site)


@register
class TokenConv(TokenMixer):
    """``s(h) = W2 relu(W1 * h + b1)``, where ``*`` is a zero-padded convolution over three tokens; ``W2 = 0``."""

    name, family = "token_conv", Family.TOKEN_NEAR

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
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = (TAPS + 1) * site.width**2
        return BlueprintCost(weights + site.width, 2 * site.positions * weights)


@register
class TokenMix(TokenMixer):
    """``s(h) = relu(M h + b) W``: ``M [T, T]`` mixes tokens, ``W [C, C]`` mixes channels; ``W = 0``.

    The token-mixing half of MLP-Mixer (Tolstikhin et al. 2021), followed by a linear map over channels.
    """

    name, family = "token_mix", Family.TOKEN_FAR
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
                f"token_mix mixes {self.positions} tokens, not {features.shape[-2]}: where their number varies, leave "
                "it out of the slot's blueprints"
            )
        columns = split_positions(to_columns(features, self.layout), self.positions)  # [..., C, T, B]
        tokens = columns.transpose(-3, -2).flatten(-2)  # [..., T, C * B]
        mixed = linear(self.mixing, tokens, self.bias).relu()
        columns = mixed.view(*mixed.shape[:-1], -1, columns.shape[-1]).transpose(-3, -2).flatten(-2)
        # `live` masks padded channels, which would get gradients otherwise: the bias is per token, for all channels.
        return from_columns(linear(self.outer * self.live.unsqueeze(-2), columns), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        parameters = site.positions**2 + site.positions + site.width**2
        return BlueprintCost(parameters, 2 * site.positions * site.width * (site.positions + site.width))


KEY = 4
"""Size of queries and keys."""
_COLUMNS_RANK = 2
"""Number of axes of one seed's columns."""
_FEW = 8
"""Up to this many tokens `attend_by_products` is faster for stacked seeds of any width: see benchmarks/attention.py."""


@register
class Attention(TokenMixer):
    """``s(h)_t = V sum_s a_ts z_s + b``, with ``z = normalise(h)``, ``a_t = softmax_s(Q z_t . K z_s)``; ``V = b = 0``.

    Attention with a single head; value and output projections are one matrix, and the usual factor ``1 / sqrt(KEY)`` is
    part of the initial query weights. At causal sites no token attends to later ones.
    """

    name, family = "attention", Family.ATTENTION
    is_causal = True
    live: Tensor

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        width = site.width
        self.queries = normal(generator, KEY, width, deviation=1 / math.sqrt(KEY * width))
        self.keys = lecun_normal(generator, KEY, width, fan_in=width)
        self.values = zeros(generator, width, width)
        self.bias = zeros(generator, width)
        self.register_buffer("live", torch.ones(width, device=generator.device))
        self.causal = site.causal

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        # Normalised, so that attention does not depend on the scale of the features.
        columns = normalise(to_columns(features, self.layout), self.live)
        positions, stacked = count_positions(features, self.layout), columns.dim() > _COLUMNS_RANK
        queries, keys, tokens = (
            split_positions(part, positions)  # [..., KEY or C, T, B]
            for part in (linear(self.queries, columns), linear(self.keys, columns), columns)
        )
        attend = attend_by_products if stacked and positions <= _FEW else attend_by_example
        attended = attend(queries, keys, tokens, causal=self.causal)  # [..., C, T, B]
        return from_columns(linear(self.values, attended.flatten(-2), self.bias), features, self.layout)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        weights = 2 * KEY * site.width + site.width**2
        attention = 2 * site.positions**2 * (KEY + site.width)
        return BlueprintCost(weights + site.width, 2 * site.positions * weights + attention)


def attend_by_example(queries: Tensor, keys: Tensor, tokens: Tensor, *, causal: bool) -> Tensor:
    """Attended tokens ``[..., C, T, B]`` from inputs ``[..., KEY or C, T, B]``, by torch's fused attention."""
    # The examples of all seeds become one batch with one head: fused kernels and ONNX need four axes.
    query, key, value = (
        part.movedim(-1, -3).mT.flatten(0, -3).unsqueeze(1).contiguous()  # [..., 1, T, KEY or C]
        for part in (queries, keys, tokens)
    )
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)
    return attended.reshape(*tokens.shape[:-3], -1, *attended.shape[-2:]).mT.movedim(-3, -1)


def attend_by_products(queries: Tensor, keys: Tensor, tokens: Tensor, *, causal: bool) -> Tensor:
    """`attend_by_example` as sums of products, with the batch kept last; allocates ``C * T * T * B`` values."""
    scores = (queries.unsqueeze(-3) * keys.unsqueeze(-2)).sum(-4)  # [..., S, T, B], with S attended tokens
    if causal:
        place = torch.arange(scores.shape[-3], device=scores.device)
        is_later = (place.unsqueeze(1) > place).unsqueeze(2)  # [S, T, 1]
        scores = scores.masked_fill(is_later, -math.inf)
    weights = scores.softmax(-3)
    return (weights.unsqueeze(-4) * tokens.unsqueeze(-2)).sum(-3)
