"""Many modules of one shape, computed at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class Stackable(nn.Module):
    """A module whose ``forward`` also computes R modules of its shape at once, without `torch.func.vmap`.

    Given stacked parameters and buffers ``[R, *shape]`` and inputs ``[R, B, ...]`` it returns ``[R, B, ...]``: it works
    on the last axes and leaves those before alone. For small modules vmap would cost more than the computation.
    """


def call_stacked(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *inputs: Tensor
) -> Tensor:
    """What R modules of the shape of ``module`` return, ``[R, ...]``.

    All tensors are stacked: ``parameters`` and ``buffers`` by name, each ``[R, *shape]``, and ``inputs``, each
    ``[R, ...]``.
    """

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return functional_call(module, (parameters, buffers), inputs)

    stacked = call if isinstance(module, Stackable) else vmap(call)
    return stacked(dict(parameters), dict(buffers), *inputs)


def linear(weight: Tensor, columns: Tensor, bias: Tensor | None = None) -> Tensor:
    """``weight [..., O, C]`` applied to each column: ``[..., C, N]`` -> ``[..., O, N]``, plus ``bias [..., O]``.

    At most one axis may stand before the others.
    """
    # Not matmul, which serves both ranks but doubles the overhead of small products, most of all in the backward pass.
    stacked = weight.dim() == 3
    if bias is None:
        return torch.bmm(weight, columns) if stacked else torch.mm(weight, columns)
    column = bias.unsqueeze(-1)
    return torch.baddbmm(column, weight, columns) if stacked else torch.addmm(column, weight, columns)
