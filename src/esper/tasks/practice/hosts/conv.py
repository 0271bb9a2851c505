"""A small convolutional network for images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe

WIDTHS = (8, 16)


class ConvNet(nn.Module):
    """Images ``[B, C, H, W]`` through two ReLU convolutions, each halving H and W, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int], classes: int) -> None:
        super().__init__()
        first, second = widths
        self.layer1 = nn.Sequential(nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(second, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer2(self.layer1(inputs)).mean((2, 3)))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> ConvNet:
    return built(lambda: ConvNet(shape[0], WIDTHS, classes), generator)


BLUEPRINTS = ("depthwise", "conv3x3")

CONV = HostKind(
    _build, {"layer1": BLUEPRINTS, "layer2": BLUEPRINTS}, Recipe(3e-3, weight_decay=0.01, batch_size=64, epochs=30)
)
