"""Layers whose first weights come from an explicit generator, never from torch's global state."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from esper.stacking import Stackable
from esper.stacking import linear as product


class Linear(nn.Linear, Stackable):
    """A linear layer on features ``[..., B, C]``, of one network or of a stack of them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Features ``[..., B, inputs]`` to ``[..., B, outputs]``."""
        return product(self.weight, input.mT, self.bias).mT


def linear(inputs: int, outputs: int, generator: torch.Generator) -> Linear:
    """A linear layer with He-uniform weights (He et al., 2015, arXiv:1502.01852) and zero biases."""
    layer = Linear(inputs, outputs, device="meta")
    _materialise(layer, inputs, generator)
    return layer


class TokenLinear(nn.Linear, Stackable):
    """A linear layer on tokens ``[..., B, T, C]`` that computes with the batch innermost in memory.

    Narrow layers are several times as fast this way on a CPU: one product with a long contiguous axis, and sums over
    tokens and biases along contiguous rows. Views do it; the order of the axes is that of `nn.Linear`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Tokens ``[..., B, T, inputs]`` to ``[..., B, T, outputs]``."""
        columns = input.transpose(-3, -1)  # [..., C, T, B]
        outputs = product(self.weight, columns.flatten(-2), self.bias)
        return outputs.view(*outputs.shape[:-1], *columns.shape[-2:]).transpose(-3, -1)


def token_linear(inputs: int, outputs: int, generator: torch.Generator) -> TokenLinear:
    """As `linear`, for tokens."""
    layer = TokenLinear(inputs, outputs, device="meta")
    _materialise(layer, inputs, generator)
    return layer


class Conv1d(nn.Conv1d, Stackable):
    """A convolution of signals ``[..., B, C, L]``, padded by half its kernel, of one network or of a stack of them.

    It computes with the batch innermost in memory, for the same reasons as `TokenLinear`: what each sample's kernel
    sees is copied into a column, and the rest is one product.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Signals ``[..., B, inputs, L]`` to ``[..., B, outputs, L']``."""
        (kernel,), (stride,) = self.kernel_size, self.stride
        signals = F.pad(input.movedim(-3, -1), (0, 0, kernel // 2, kernel // 2))  # [..., C, L, B]
        seen = signals.unfold(-2, kernel, stride).movedim(-1, -3)  # [..., C, K, L', B]
        columns = seen.flatten(-4, -3).flatten(-2)
        outputs = product(self.weight.flatten(-2), columns, self.bias)
        return outputs.view(*outputs.shape[:-1], *seen.shape[-2:]).movedim(-1, -3)


def conv1d(inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator) -> Conv1d:
    """A convolution padded by half its kernel, with He-uniform weights and zero biases."""
    layer = Conv1d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, device="meta")
    _materialise(layer, inputs * kernel, generator)
    return layer


def _materialise(layer: nn.Linear | nn.Conv1d, fan_in: int, generator: torch.Generator) -> None:
    """Give storage to a layer built without: built with storage, it would draw from the global state."""
    bound = math.sqrt(6 / fan_in)
    layer.weight = nn.Parameter(torch.empty(layer.weight.shape).uniform_(-bound, bound, generator=generator))
    layer.bias = nn.Parameter(torch.zeros(layer.weight.shape[0]))
