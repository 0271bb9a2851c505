"""Many modules of one shape, computed at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Stackable(nn.Module):
    """A module whose ``forward`` also computes R modules of its shape at once, without `torch.func.vmap`.

    With stacked parameters and buffers ``[R, *shape]`` and inputs ``[R, B, ...]`` it returns ``[R, B, ...]``: it works
    on the last axes only. For small modules vmap would cost more than the computation. Its forward reads parameters
    and buffers as attributes, and must not call ``parameters()``.
    """


def linear(weight: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``weight [..., O, C]`` to each column: ``[..., C, N]`` -> ``[..., O, N]``, plus ``bias [..., O]``.

    There may be one axis before the others.
    """
    # Not matmul, which takes both ranks but doubles the overhead of small products, most of all in the backward pass.
    stacked = weight.dim() == 3
    if bias is None:
        return torch.bmm(weight, columns) if stacked else torch.mm(weight, columns)
    column = bias.unsqueeze(-1)
    return torch.baddbmm(column, weight, columns) if stacked else torch.addmm(column, weight, columns)
