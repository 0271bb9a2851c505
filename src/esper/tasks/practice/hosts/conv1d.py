"""A small convolutional network for signals."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe

WIDTHS = (8, 8, 8)


class Conv1dNet(nn.Module):
    """Signals ``[B, C, L]`` through three ReLU convolutions, the first two halving L, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        first, second, third = widths
        self.layer1 = nn.Sequential(nn.Conv1d(channels, first, 5, stride=2, padding=2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv1d(first, second, 3, stride=2, padding=1), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv1d(second, third, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(third, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer3(self.layer2(self.layer1(inputs))).mean(-1))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Conv1dNet:
    return built(lambda: Conv1dNet(shape[0], WIDTHS, classes), generator)


BLUEPRINTS = ("depthwise", "conv3x3")

CONV1D = HostKind(
    _build,
    {"layer1": BLUEPRINTS, "layer2": BLUEPRINTS, "layer3": BLUEPRINTS},
    Recipe(5e-3, weight_decay=0.01, batch_size=64, epochs=40),
)
