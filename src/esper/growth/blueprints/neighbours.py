"""Neighbouring positions side by side, so that a convolution is one linear map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.growth.site import Site

TAPS = 3
"""Kernel size along each axis: a position and its two neighbours."""


def shifted(columns: Tensor) -> list[Tensor]:
    """``[C, P, B]`` -> for each tap ``[C, P, B]``: what lies one before, at, and one after each position, or zero."""
    positions = columns.shape[1]
    padded = F.pad(columns, (0, 0, TAPS // 2, TAPS // 2))
    return [padded[:, tap : tap + positions] for tap in range(TAPS)]


def neighbours(columns: Tensor) -> Tensor:
    """``[C, P, B]`` -> ``[TAPS * C, P, B]``, tap by tap."""
    return torch.cat(shifted(columns))


def has_neighbours(site: Site) -> bool:
    """Whether every tap meets something somewhere; along an axis of one position the outer taps would be dead."""
    return min(site.extent, default=1) > 1
