"""A small Vision Transformer (Dosovitskiy et al., 2021, arXiv:2010.11929)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe
from esper.tasks.practice.hosts.transformer import TransformerBlock

WIDTH, HEADS = 24, 4
PATCHES = 4
"""Patches along the shorter side of an image, at most."""


class ViT(nn.Module):
    """Images ``[B, C, H, W]`` as patches through two blocks; the mean over patches to logits ``[B, classes]``."""

    def __init__(self, shape: tuple[int, ...], width: int, heads: int, classes: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        side = -(-min(height, breadth) // PATCHES)
        count = (height // side) * (breadth // side)
        self.patches = nn.Conv2d(channels, width, side, stride=side)
        self.places = nn.Embedding(count, width)
        self.block1 = TransformerBlock(width, heads)
        self.block2 = TransformerBlock(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.places.weight  # [B, T, D]
        return self.head(self.norm(self.block2(self.block1(tokens))).mean(1))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> ViT:
    return built(lambda: ViT(shape, WIDTH, HEADS, classes), generator)


BLUEPRINTS = ("mlp", "attention", "token_conv")

VIT = HostKind(
    _build, {"block1": BLUEPRINTS, "block2": BLUEPRINTS}, Recipe(2e-3, weight_decay=0.05, batch_size=64, epochs=40)
)
