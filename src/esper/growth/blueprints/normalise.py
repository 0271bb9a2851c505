"""Normalisation over the live channels of each position."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-5
"""Added to the mean square, so that silent positions stay finite."""


def normalise(columns: Tensor, live: Tensor) -> Tensor:
    """Columns ``[..., C, N]`` scaled to a root mean square of one over channels (Zhang & Sennrich 2019).

    ``live [..., C]`` is one for real channels and zero for padded ones; padded channels must be zero, so they add
    nothing to the sum and only the count needs to know them. The mean is kept: taking it away would leave nothing of a
    single channel, and little of two.
    """
    count = live.sum(-1)[..., None, None]
    return columns * (columns.square().sum(-2, keepdim=True) / count + EPSILON).rsqrt()
