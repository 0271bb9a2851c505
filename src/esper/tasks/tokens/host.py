"""The token suite's host: three per-token layers, mean over tokens, linear head. It cannot mix tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from esper.stacking import Stackable
from esper.tasks.layers import linear, token_linear

TOKENS, FEATURES, CLASSES = 8, 5, 4


class TokenLayer(nn.Module):
    """``act(W h + b)`` on every token, where ``act`` multiplies negative values by a slope: 0 for ReLU, 1 for none.

    The slope is a buffer, so that hosts of either kind stack into one program.
    """

    slope: torch.Tensor

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = token_linear(inputs, outputs, generator)
        self.register_buffer("slope", torch.tensor(slope))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[..., B, T, inputs]`` to ``[..., B, T, outputs]``."""
        return self.activate(self.linear(features))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of features ``[..., B, T, outputs]``."""
        if not x.requires_grad:
            return torch.prelu(x.unsqueeze(0), self.slope.reshape(-1)).squeeze(0)  # networks in the place of channels
        # The same as a product with the derivative, a constant: the derivative of prelu would cost ten times as much.
        return x * x.detach().sign().clamp_min_(self.slope[..., None, None, None])


class PositionedTokenLayer(TokenLayer):
    """A token layer with one more learned bias for every position."""

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, slope, generator)
        self.position = nn.Parameter(torch.zeros(TOKENS, outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[..., B, T, inputs]`` to ``[..., B, T, outputs]``."""
        return self.activate(self.linear(features) + self.position.unsqueeze(-3))


def token_mean(features: torch.Tensor) -> torch.Tensor:
    """The mean over an even number T of tokens: features ``[..., B, T, C]`` to ``[..., B, C]``, contiguous."""
    # As `mean` would add them, but along the axis that is innermost in memory, which takes a tenth of its time.
    first, second = features.transpose(-3, -1).chunk(2, dim=-2)
    return ((first + second).sum(dim=-2) / features.shape[-2]).mT.contiguous()


class TokenHost(Stackable):
    """Inputs ``[..., B, TOKENS, FEATURES]`` to logits ``[..., B, CLASSES]``.

    ``layer0`` to ``layer2`` are the growth sites.
    """

    def __init__(self, widths: Sequence[int], *, linear_host: bool, generator: torch.Generator) -> None:
        super().__init__()
        slope = 1.0 if linear_host else 0.0
        first, second, third = widths
        self.layer0 = PositionedTokenLayer(FEATURES, first, slope, generator)
        self.layer1 = TokenLayer(first, second, slope, generator)
        self.layer2 = TokenLayer(second, third, slope, generator)
        self.head = linear(third, CLASSES, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., B, CLASSES]``."""
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(token_mean(features))
