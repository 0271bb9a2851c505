"""Narrow hosts for fixed data sets; narrower ones are wider ones with zeros, as Suite promises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from esper.stacking import Stackable
from esper.tasks.layers import conv1d, linear


class MlpHost(Stackable):
    """Features ``[..., B, D]`` through two ReLU layers to logits ``[..., B, classes]``;
    ``layer0`` and ``layer1`` are sites.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second = widths
        self.layer0 = nn.Sequential(linear(features, first, generator), nn.ReLU())
        self.layer1 = nn.Sequential(linear(first, second, generator), nn.ReLU())
        self.head = linear(second, classes, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., B, classes]``."""
        return self.head(self.layer1(self.layer0(inputs)))


class ConvHost(Stackable):
    """Signals ``[..., B, 1, L]`` through three ReLU convolutions, mean over L and a linear head to logits.

    ``layer0`` to ``layer2`` are sites; the first two convolutions halve L.
    """

    def __init__(self, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second, third = widths
        self.layer0 = nn.Sequential(conv1d(1, first, 5, 2, generator), nn.ReLU())
        self.layer1 = nn.Sequential(conv1d(first, second, 3, 2, generator), nn.ReLU())
        self.layer2 = nn.Sequential(conv1d(second, third, 3, 1, generator), nn.ReLU())
        self.head = linear(third, classes, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., B, classes]``."""
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(features.mean(dim=-1))
