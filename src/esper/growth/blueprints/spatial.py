"""Blueprints that mix neighbouring samples or pixels: convolutions."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.blueprints.layers import (
    TAPS,
    count_positions,
    from_columns,
    gather_neighbours,
    has_neighbours,
    he_normal,
    lecun_normal,
    shift,
    to_columns,
    zeros,
)
from esper.growth.blueprints.registry import Blueprint, Family, register
from esper.growth.site import Layout, Site
from esper.numerics.stacking import linear


def count_taps(site: Site) -> int:
    """Number of kernel entries for each pair of channels: 9 on images, 3 on sequences."""
    return TAPS ** len(site.extent)


class Convolution(Blueprint):
    """Base class of blueprints with a zero-padded convolution."""

    family: ClassVar[Family] = Family.SPATIAL
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and has_neighbours(site)


@register
class Conv3x3(Convolution):
    """``s(h) = W2 relu(W1 * h + b1) + b2``, where ``*`` is a 3x3 convolution (3 on sequences); ``W2 = b2 = 0``."""

    name: ClassVar[str] = "conv3x3"

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
        # Images use torch's convolutions; sequences, as columns, one product with all neighbours.
        if self.layout is Layout.IMAGE:
            kernel = self.kernel.permute(0, 3, 1, 2)
            hidden = F.conv2d(features, kernel, self.bias, padding=TAPS // 2).relu()
            return F.conv2d(hidden, self.outer[:, :, None, None], self.outer_bias)
        around = gather_neighbours(to_columns(features, self.layout), count_positions(features, self.layout))
        hidden = linear(self.kernel.flatten(1), around, self.bias).relu()
        return from_columns(linear(self.outer, hidden, self.outer_bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return (count_taps(site) + 1) * site.width**2 + 2 * site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * (count_taps(site) + 1) * site.width**2


@register
class Depthwise(Convolution):
    """``s(h) = W (k * h) + b``, where ``k`` has one 3x3 kernel per channel (3 on sequences); ``W = b = 0``.

    There is no ReLU in between, so the output of ``k`` keeps its sign; the host's own activation follows soon.
    """

    name: ClassVar[str] = "depthwise"

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        taps = (TAPS,) * len(site.extent)
        self.kernel = lecun_normal(generator, site.width, *taps, fan_in=count_taps(site))
        self.pointwise = zeros(generator, site.width, site.width)
        self.bias = zeros(generator, site.width)

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        # Images use torch's convolutions; sequences, as columns, one product per tap.
        if self.layout is Layout.IMAGE:
            kernel = self.kernel[:, None]
            filtered = F.conv2d(features, kernel, padding=TAPS // 2, groups=kernel.shape[0])
            return F.conv2d(filtered, self.pointwise[:, :, None, None], self.bias)
        before, here, after = shift(to_columns(features, self.layout), count_positions(features, self.layout))
        left, centre, right = self.kernel.unsqueeze(-1).unbind(1)
        filtered = left * before + centre * here + right * after
        return from_columns(linear(self.pointwise, filtered, self.bias), features, self.layout)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return count_taps(site) * site.width + site.width**2 + site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 2 * site.positions * (count_taps(site) * site.width + site.width**2)


REDUCTION = 4
"""Ratio of the site's channels to those of a bottleneck's convolution."""


@register
class Bottleneck(Convolution):
    """``s(h) = W3 relu(W2 * relu(W1 h + b1) + b2) + b3``, where ``*`` is a 3x3 convolution; ``W3 = b3 = 0``.

    ``W1`` maps to a quarter of the channels, ``W2`` convolves these (with kernel size 3 on sequences), and ``W3`` maps
    back. This is the residual block of He et al. 2016 (section 4.1), without its normalisations.
    """

    name: ClassVar[str] = "bottleneck"

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
    def parameters_at(cls, site: Site) -> int:
        width, inner = site.width, cls.inner_width(site)
        return 2 * inner * width + count_taps(site) * inner**2 + 2 * inner + width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        width, inner = site.width, cls.inner_width(site)
        return 2 * site.positions * (2 * inner * width + count_taps(site) * inner**2)
