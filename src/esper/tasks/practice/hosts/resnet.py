"""A small residual network (He et al., 2016, arXiv:1512.03385)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe

WIDTHS = (8, 16, 32)


class Block(nn.Module):
    """Two normalised 3 x 3 convolutions and a skip; features ``[B, inputs, H, W]`` to ``[B, outputs, ...]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features of the block's width."""
        inner = self.norm1(self.conv1(features)).relu()
        return (self.norm2(self.conv2(inner)) + self.skip(features)).relu()


class ResNet(nn.Module):
    """Images ``[B, C, H, W]`` through three blocks, the later ones halving H and W, to logits ``[B, classes]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        first, second, third = widths
        self.stem = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()
        )
        self.layer1 = Block(first, first, 1)
        self.layer2 = Block(first, second, 2)
        self.layer3 = Block(second, third, 2)
        self.head = nn.Linear(third, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        features = self.layer3(self.layer2(self.layer1(self.stem(inputs))))
        return self.head(features.mean((2, 3)))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> ResNet:
    return built(lambda: ResNet(shape[0], WIDTHS, classes), generator)


BLUEPRINTS = ("depthwise", "conv3x3")

RESNET = HostKind(
    _build,
    {"layer1": BLUEPRINTS, "layer2": BLUEPRINTS, "layer3": BLUEPRINTS},
    Recipe(3e-3, weight_decay=0.05, batch_size=128, epochs=20),
)
