"""A tiny causal language model (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.tasks.practice.hosts.initial import built
from esper.tasks.practice.hosts.kind import HostKind, Recipe
from esper.tasks.practice.hosts.transformer import TransformerBlock

WIDTH, HEADS = 32, 4


class Gpt(nn.Module):
    """Indices int64 ``[B, T]``, T at most ``length``, through two causal blocks to logits ``[B, T, classes]``."""

    def __init__(self, length: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.places = nn.Embedding(length, width)
        self.block1 = TransformerBlock(width, heads, causal=True)
        self.block2 = TransformerBlock(width, heads, causal=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, indices: Tensor) -> Tensor:
        """Logits ``[B, T, classes]`` of the next index at each position."""
        tokens = self.characters(indices) + self.places.weight[: indices.shape[1]]
        return self.head(self.norm(self.block2(self.block1(tokens))))


def _build(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Gpt:
    (length,) = shape
    return built(lambda: Gpt(length, WIDTH, HEADS, classes), generator)


BLUEPRINTS = ("mlp", "attention")

GPT = HostKind(
    _build, {"block1": BLUEPRINTS, "block2": BLUEPRINTS}, Recipe(3e-3, weight_decay=0.05, batch_size=64, epochs=15)
)
