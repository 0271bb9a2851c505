"""Initial values of parameters, drawn from an explicit generator and placed on its device."""

from __future__ import annotations

import math

import torch
from torch import nn


def normal(generator: torch.Generator, *shape: int, deviation: float) -> nn.Parameter:
    """Independent normal entries with mean zero."""
    values = torch.empty(shape, device=generator.device)
    return nn.Parameter(nn.init.normal_(values, std=deviation, generator=generator))


def before_relu(generator: torch.Generator, *shape: int, fan_in: int) -> nn.Parameter:
    """Normal entries of variance ``2 / fan_in``, which keep the scale through a ReLU (He et al. 2015, eq. 10)."""
    return normal(generator, *shape, deviation=math.sqrt(2 / fan_in))


def linear(generator: torch.Generator, *shape: int, fan_in: int) -> nn.Parameter:
    """Normal entries of variance ``1 / fan_in``, which keep the scale through a linear map."""
    return normal(generator, *shape, deviation=math.sqrt(1 / fan_in))


def zeros(generator: torch.Generator, *shape: int) -> nn.Parameter:
    """Zeros, on the generator's device; nothing is drawn."""
    return nn.Parameter(torch.zeros(shape, device=generator.device))
