"""The token suite's host: three per-token layers, mean over tokens, linear head. It cannot mix tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from esper.tasks.layers import linear, token_linear

TOKENS, FEATURES, CLASSES = 8, 5, 4
LAYERS = 3


class TokenLayer(nn.Module):
    """``act(W h + b)`` on every token, where ``act`` passes what exceeds a threshold: 0 for ReLU, -inf for the identity.

    The threshold is a buffer, so that hosts of either kind stack into one program.
    """

    threshold: torch.Tensor

    def __init__(self, inputs: int, outputs: int, threshold: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = token_linear(inputs, outputs, generator)
        self.register_buffer("threshold", torch.tensor(threshold))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[B, T, inputs]`` to ``[B, T, outputs]``."""
        return self.activate(self.linear(features))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation, any shape."""
        # A product with a mask: a maximum of two tensors costs several times as much in the backward pass.
        return x * (x > self.threshold).to(x.dtype)


class PositionedTokenLayer(TokenLayer):
    """A token layer with one more learned bias for every position."""

    def __init__(self, inputs: int, outputs: int, threshold: float, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, threshold, generator)
        self.position = nn.Parameter(torch.zeros(TOKENS, outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[B, T, inputs]`` to ``[B, T, outputs]``."""
        return self.activate(self.linear(features) + self.position)


class TokenHost(nn.Module):
    """Inputs ``[B, TOKENS, FEATURES]`` to logits ``[B, CLASSES]``; ``layer0`` to ``layer2`` are the growth sites."""

    def __init__(self, widths: Sequence[int], *, linear_host: bool, generator: torch.Generator) -> None:
        super().__init__()
        threshold = -math.inf if linear_host else 0.0
        first, second, third = widths
        self.layer0 = PositionedTokenLayer(FEATURES, first, threshold, generator)
        self.layer1 = TokenLayer(first, second, threshold, generator)
        self.layer2 = TokenLayer(second, third, threshold, generator)
        self.head = linear(third, CLASSES, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, CLASSES]``."""
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(features.mean(dim=-2))
