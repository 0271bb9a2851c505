"""Layers whose first weights come from an explicit generator, never from torch's global state."""

from __future__ import annotations

import math

import torch
from torch import nn


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A linear layer with He-uniform weights (He et al., 2015, arXiv:1502.01852) and zero biases."""
    layer = nn.Linear(inputs, outputs, device="meta")
    _materialise(layer, inputs, generator)
    return layer


def conv1d(inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator) -> nn.Conv1d:
    """A convolution padded by half its kernel, with He-uniform weights and zero biases."""
    layer = nn.Conv1d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, device="meta")
    _materialise(layer, inputs * kernel, generator)
    return layer


def _materialise(layer: nn.Linear | nn.Conv1d, fan_in: int, generator: torch.Generator) -> None:
    """Give storage to a layer built without: built with storage, it would draw from the global state."""
    bound = math.sqrt(6 / fan_in)
    layer.weight = nn.Parameter(torch.empty(layer.weight.shape).uniform_(-bound, bound, generator=generator))
    layer.bias = nn.Parameter(torch.zeros(layer.weight.shape[0]))
