"""Layers whose initial weights come from an explicit generator, never from torch's global random state."""

from __future__ import annotations

import math

import torch
from torch import nn

RELU_GAIN = math.sqrt(2.0)


def linear(inputs: int, outputs: int, generator: torch.Generator, gain: float = 1.0) -> nn.Linear:
    """A linear layer with an orthogonal weight times ``gain`` (Saxe et al., 2014) and zero bias."""
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def embedding(count: int, width: int, generator: torch.Generator) -> nn.Embedding:
    """A table of ``count`` standard-normal vectors."""
    table = nn.Embedding(count, width, device="meta").to_empty(device="cpu")
    nn.init.normal_(table.weight, generator=generator)
    return table


def lstm(inputs: int, hidden: int, memory: int, generator: torch.Generator) -> nn.LSTM:
    """A one-layer LSTM, orthogonal per gate, whose gates start with time constants spread over 1..``memory`` steps.

    Forget biases are log(u) with u uniform in [1, memory - 1] and input biases their negatives: the chrono
    initialisation of Tallec and Ollivier (2018). A unit then forgets at a rate of about 1/u per step.
    """
    layer = nn.LSTM(inputs, hidden, device="meta").to_empty(device="cpu")
    weights = dict(layer.named_parameters())
    for name in ("weight_ih_l0", "weight_hh_l0"):
        for gate in weights[name].detach().chunk(4):
            nn.init.orthogonal_(gate, generator=generator)
    for name in ("bias_ih_l0", "bias_hh_l0"):
        nn.init.zeros_(weights[name])
    input_bias, forget_bias, _, _ = weights["bias_ih_l0"].detach().chunk(4)  # torch's order of the gates
    forget_bias.uniform_(1.0, max(2.0, memory - 1.0), generator=generator).log_()
    input_bias.copy_(-forget_bias)
    return layer
