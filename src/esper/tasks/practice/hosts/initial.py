"""Hosts whose first weights come from an explicit generator, never from torch's global state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

EMBEDDING_DEVIATION = 0.02
"""As in GPT-2 (Radford et al., 2019)."""

Host = TypeVar("Host", bound=nn.Module)


def built(make: Callable[[], Host], generator: torch.Generator) -> Host:
    """What ``make`` makes of linear, convolution, embedding and normalisation layers, with fresh weights.

    Weights are He-uniform (He et al., 2015, arXiv:1502.01852), embeddings normal, biases zero.

    Raises:
        TypeError: it has parameters of another kind.
    """
    with torch.device("meta"):
        host = make()
    host.to_empty(device=generator.device)
    for module in host.modules():
        _initialise(module, generator)
    return host


@torch.no_grad()
def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    match module:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d():
            bound = math.sqrt(6 / module.weight[0].numel())
            module.weight.uniform_(-bound, bound, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        case nn.Embedding():
            module.weight.normal_(std=EMBEDDING_DEVIATION, generator=generator)
        case nn.LayerNorm() | nn.BatchNorm1d() | nn.BatchNorm2d():
            module.reset_parameters()
        case _:
            if any(True for _ in module.parameters(recurse=False)):
                raise TypeError(f"no rule for the first weights of {type(module).__name__}")
