"""Neighbouring positions side by side, so that a convolution is one linear map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.site import Site

TAPS = 3
"""Kernel size along each axis: a position and its two neighbours."""


def shifted(columns: Tensor, positions: int) -> list[Tensor]:
    """Columns ``[..., C, P * B]`` one position before, at, and one after each position; zeros beyond the ends."""
    count = columns.shape[-1]
    step = count // positions
    padded = F.pad(columns, (TAPS // 2 * step, TAPS // 2 * step))
    return [padded.narrow(-1, tap * step, count) for tap in range(TAPS)]


def neighbours(columns: Tensor, positions: int) -> Tensor:
    """``[..., C, P * B]`` -> ``[..., TAPS * C, P * B]``, tap by tap."""
    return torch.cat(shifted(columns, positions), dim=-2)


def has_neighbours(site: Site) -> bool:
    """Whether every tap meets something somewhere; along an axis of one position the outer taps would be dead."""
    return min(site.extent, default=1) > 1
