"""Layers for one network or many of one shape at once, initialised from an explicit generator.

Weights are He-uniform (He et al., 2015, arXiv:1502.01852) and biases are zero. Torch's global generator is not used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def initialise(layer: nn.Linear | nn.Conv1d | nn.Conv2d, generator: torch.Generator) -> None:
    """Initialise a layer that was built on the device "meta".

    Building it on another device would draw from the global generator.
    """
    # He-uniform: the bound is sqrt(6 / fan-in).
    shape = layer.weight.shape
    bound = math.sqrt(6 / shape[1:].numel())
    layer.weight = nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    layer.bias = nn.Parameter(torch.zeros(shape[0]))


class Linear(nn.Linear, Stackable):
    """A linear layer on features ``[..., B, C]``."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, device="meta")
        initialise(self, generator)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return linear(self.weight, input.mT, self.bias).mT


class TokenLinear(Linear):
    """A linear layer on tokens ``[..., B, T, C]`` that computes with the batch innermost in memory.

    This makes narrow layers several times faster on a CPU: one product with a long contiguous axis, and sums over
    tokens and biases along contiguous rows. Views keep the order of axes of `nn.Linear`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        columns = input.transpose(-3, -1)  # [..., C, T, B]
        outputs = linear(self.weight, columns.flatten(-2), self.bias)
        return outputs.view(*outputs.shape[:-1], *columns.shape[-2:]).transpose(-3, -1)


class Conv1d(nn.Conv1d, Stackable):
    """A convolution on signals ``[..., B, C, L]``, padded by half its kernel.

    It computes with the batch innermost in memory, as `TokenLinear` does: each output's receptive field is copied into
    a column, and the convolution becomes one matrix product.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, device="meta")
        initialise(self, generator)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        (kernel,), (stride,) = self.kernel_size, self.stride
        signals = F.pad(input.movedim(-3, -1), (0, 0, kernel // 2, kernel // 2))  # [..., C, L, B]
        windows = signals.unfold(-2, kernel, stride).movedim(-1, -3)  # [..., C, K, L', B]
        columns = windows.flatten(-4, -3).flatten(-2)
        outputs = linear(self.weight.flatten(-2), columns, self.bias)
        return outputs.view(*outputs.shape[:-1], *windows.shape[-2:]).movedim(-1, -3)
