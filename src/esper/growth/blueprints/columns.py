"""Features as *columns* ``[..., C, P * B]``: channels first, then positions, the batch last.

Seeds are narrow. With the batch last, a linear map is one matrix product with a long contiguous axis, and element-wise
work runs along the batch: on a CPU this is up to twice as fast as working on ``[B, T, C]``.

Everything here works on the last axes and leaves those before alone, so a blueprint written with it computes one seed
from ``[B, ...]`` features, and R seeds with stacked parameters ``[R, *shape]`` from ``[R, B, ...]``.
"""

from __future__ import annotations

from torch import Tensor

from esper.growth.site import Layout


def to_columns(features: Tensor, layout: Layout) -> Tensor:
    """``[..., B, *example]`` -> ``[..., C, P * B]``, contiguous; plain features have one position."""
    match layout:
        case Layout.FEATURES:
            columns = features.mT
        case Layout.TOKENS:
            columns = features.transpose(-3, -1).flatten(-2)
        case Layout.SEQUENCE:
            columns = features.movedim(-3, -1).flatten(-2)
        case Layout.IMAGE:
            columns = features.movedim(-4, -1).flatten(-3)
    return columns.contiguous()


def from_columns(columns: Tensor, features: Tensor, layout: Layout) -> Tensor:
    """``[..., C, P * B]`` -> the shape of ``features``."""
    match layout:
        case Layout.FEATURES:
            return columns.mT
        case Layout.TOKENS:
            return by_position(columns, features.shape[-2]).transpose(-3, -1)
        case Layout.SEQUENCE:
            return by_position(columns, features.shape[-1]).movedim(-1, -3)
        case Layout.IMAGE:
            return columns.reshape(*columns.shape[:-1], *features.shape[-2:], -1).movedim(-1, -4)


def positions_in(features: Tensor, layout: Layout) -> int:
    """P, how many channel vectors each example of ``features [..., B, *example]`` has."""
    match layout:
        case Layout.FEATURES:
            return 1
        case Layout.TOKENS:
            return features.shape[-2]
        case Layout.SEQUENCE:
            return features.shape[-1]
        case Layout.IMAGE:
            return features.shape[-2] * features.shape[-1]


def by_position(columns: Tensor, positions: int) -> Tensor:
    """``[..., C, P * B]`` -> ``[..., C, P, B]``."""
    return columns.reshape(*columns.shape[:-1], positions, -1)
