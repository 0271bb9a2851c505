"""Parts of blueprints: initial values, features as columns, neighbouring positions and normalisation.

*Columns* are features ``[..., C, P * B]``: channels first, then positions, the batch last. Seeds are narrow, so a
linear map is one matrix product with a long contiguous axis: on a CPU up to twice as fast as on ``[B, T, C]``.

Functions on columns use only the last axes. So a blueprint written with them computes one seed from features
``[B, ...]``, or R seeds with stacked parameters ``[R, *shape]`` from features ``[R, B, ...]``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.site import CHANNELS_LAST, Layout, Site


def normal(generator: torch.Generator, *shape: int, deviation: float) -> nn.Parameter:
    """Independent normal entries with mean zero."""
    values = torch.empty(shape, device=generator.device)
    return nn.Parameter(nn.init.normal_(values, std=deviation, generator=generator))


def he_normal(generator: torch.Generator, *shape: int, fan_in: int) -> nn.Parameter:
    """Normal entries of variance ``2 / fan_in``, which preserve the scale through a ReLU (He et al. 2015, eq. 10)."""
    return normal(generator, *shape, deviation=math.sqrt(2 / fan_in))


def lecun_normal(generator: torch.Generator, *shape: int, fan_in: int) -> nn.Parameter:
    """Normal entries of variance ``1 / fan_in``, which preserve the scale through a linear map."""
    return normal(generator, *shape, deviation=math.sqrt(1 / fan_in))


def zeros(generator: torch.Generator, *shape: int) -> nn.Parameter:
    """Zeros on the generator's device; nothing is drawn."""
    return nn.Parameter(torch.zeros(shape, device=generator.device))


_AXES = {Layout.FEATURES: 1, Layout.TOKENS: 2, Layout.SEQUENCE: 2, Layout.IMAGE: 3}
"""Number of axes of one example's features."""


def to_columns(features: Tensor, layout: Layout) -> Tensor:
    """Turn ``[..., B, *example]`` into contiguous columns ``[..., C, P * B]``; plain features have one position."""
    # The batch changes places with channels that are last, or else goes behind all axes.
    move, axes = torch.transpose if layout in CHANNELS_LAST else torch.movedim, _AXES[layout]
    return move(features, -1 - axes, -1).flatten(-axes).contiguous()


def from_columns(columns: Tensor, features: Tensor, layout: Layout) -> Tensor:
    """Turn columns ``[..., C, P * B]`` back into the shape of ``features``."""
    move = torch.transpose if layout in CHANNELS_LAST else torch.movedim
    spread = columns.reshape(*columns.shape[:-1], *_find_extent(features, layout), -1)
    return move(spread, -1, -1 - _AXES[layout])


def count_positions(features: Tensor, layout: Layout) -> int:
    """The number of positions P of each example in ``features [..., B, *example]``."""
    return math.prod(_find_extent(features, layout))


def _find_extent(features: Tensor, layout: Layout) -> torch.Size:
    """The shape of one example's features without channels."""
    axes = _AXES[layout]
    return features.shape[-axes:-1] if layout in CHANNELS_LAST else features.shape[-axes:][1:]


def split_positions(columns: Tensor, positions: int) -> Tensor:
    """View columns ``[..., C, P * B]`` as ``[..., C, P, B]``."""
    return columns.reshape(*columns.shape[:-1], positions, -1)


TAPS = 3
"""Kernel size along each axis: a position and its two neighbours."""


def shift(columns: Tensor, positions: int) -> list[Tensor]:
    """For columns ``[..., C, P * B]``: those one position before, at, and one after; zeros beyond the ends."""
    # With the batch last, the next position is B entries further on; each tap is a view of one padded copy.
    count = columns.shape[-1]
    step = count // positions
    padded = F.pad(columns, (TAPS // 2 * step, TAPS // 2 * step))
    return [padded.narrow(-1, tap * step, count) for tap in range(TAPS)]


def gather_neighbours(columns: Tensor, positions: int) -> Tensor:
    """Stack the neighbours of columns ``[..., C, P * B]`` as channels ``[..., TAPS * C, P * B]``, tap by tap."""
    return torch.cat(shift(columns, positions), dim=-2)


def has_neighbours(site: Site) -> bool:
    """Whether there are at least two positions along every axis; with one, the outer taps would only see zeros."""
    return min(site.extent, default=1) > 1


EPSILON = 1e-5
"""Added to the mean square, so that positions of zeros stay finite."""


def normalise(columns: Tensor, live: Tensor) -> Tensor:
    """Scale columns ``[..., C, N]`` to a root mean square of one over channels (Zhang & Sennrich 2019).

    ``live [..., C]`` is one for real channels and zero for padded ones, which must be zero. The mean is not subtracted:
    a single channel would become zero, and two would keep little more than a sign.
    """
    count = live.sum(-1)[..., None, None]
    return columns * (columns.square().sum(-2, keepdim=True) / count + EPSILON).rsqrt()
