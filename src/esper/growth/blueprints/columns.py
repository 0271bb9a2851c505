"""Features as *columns* ``[C, P, B]``: channels first, then positions, the batch last.

Seeds are narrow. With the batch last, a linear map is one matrix product with a long contiguous axis, and element-wise
work runs along the batch: on a CPU, under vmap, this is up to twice as fast as working on ``[B, T, C]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.growth.site import Layout

CHANNELS_LAST = frozenset({Layout.FEATURES, Layout.TOKENS})
"""Layouts whose channels are the last axis; in the others they follow the batch."""


def to_columns(features: Tensor, layout: Layout) -> Tensor:
    """``[B, ...]`` -> ``[C, P, B]``, contiguous; plain features have one position."""
    if layout in CHANNELS_LAST:
        columns = features.reshape(features.shape[0], -1, features.shape[-1]).permute(2, 1, 0)
    else:
        columns = features.flatten(2).permute(1, 2, 0)
    return columns.contiguous()


def from_columns(columns: Tensor, features: Tensor, layout: Layout) -> Tensor:
    """``[C, P, B]`` -> the shape of ``features``."""
    order = (2, 1, 0) if layout in CHANNELS_LAST else (2, 0, 1)
    return columns.permute(order).reshape(features.shape)


def linear(weight: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """``weight [O, C]`` applied at every position: ``[C, P, B]`` -> ``[O, P, B]``, plus ``bias [O]``."""
    # Not addmm: vmap decomposes it into more operations than these two.
    product = torch.mm(weight, columns.flatten(1)).view(-1, *columns.shape[1:])
    return product if bias is None else product + bias[:, None, None]
