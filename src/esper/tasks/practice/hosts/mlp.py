"""A multilayer perceptron."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe

WIDTH = 32


class Mlp(nn.Module):
    """Inputs ``[B, ...]``, flattened, through two ReLU layers to logits ``[B, classes]``."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        return self.head(self.layer2(self.layer1(inputs.flatten(1))))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Mlp:
    return built(lambda: Mlp(math.prod(shape), WIDTH, classes), generator)


BLUEPRINTS = ("lowrank", "mlp", "mlp_wide")

MLP = HostKind(
    _build, {"layer1": BLUEPRINTS, "layer2": BLUEPRINTS}, Recipe(3e-3, weight_decay=0.01, batch_size=64, epochs=40)
)
