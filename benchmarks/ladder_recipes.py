"""Does a ladder rank recipes at every size as separate trainings do? Six recipes, three seeds, depths 1, 2, 4 and 8.

    python benchmarks/ladder_recipes.py FOLDER            # --steps 4800 for as long as in benchmarks/ladder.py

Each recipe differs from the first in one thing: half the learning rate, no weight decay, ReLU, a head tied to the
embedding, the norm behind the sum. Means over seeds of losses on the text's last tenth; by size, Kendall's tau between
the two rankings, the share of pairs of recipes whose difference has the same sign, and by how much rungs are above
their twins. Nothing is chosen, so there is no seed that chooses. What was killed goes on where it was; started
several times at once, it shares its work.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import tyro
from families import ALONE, DEPTHS, Family, Results, Training
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau
from tiny_gpt import HEADS, WIDTH, Stream, measure, text
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import WINDOW
from zoo.hosts import SelfAttention

from esper.dash.output import print_line

SEEDS, SHARE, RATE = (1, 2, 3), 0.2, 12e-3


class Block(nn.Module):
    """Attention and a layer of twice the width beside skips; the norm before each, or behind the sum."""

    def __init__(self, activation: nn.Module, *, post_norm: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(WIDTH, HEADS, causal=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH))
        self.post_norm = post_norm

    def forward(self, tokens: Tensor) -> Tensor:
        if self.post_norm:
            tokens = self.norm1(tokens + self.attention(tokens))
            return self.norm2(tokens + self.mlp(tokens))
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Gpt(nn.Module):
    """Indices int64 ``[B, T]`` to logits ``[B, T, classes]``."""

    def __init__(self, depth: int, classes: int, *, relu: bool, tied: bool, post_norm: bool) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(classes, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(Block(nn.ReLU() if relu else nn.GELU(), post_norm=post_norm) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)
        if tied:
            nn.init.normal_(self.characters.weight, std=WIDTH**-0.5)
            self.head.weight = self.characters.weight

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.characters(indices) + self.positions.weight[: indices.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_recipe(
    name: str,
    steps: int,
    *,
    rate: float = RATE,
    weight_decay: float = 0.1,
    relu: bool = False,
    tied: bool = False,
    post_norm: bool = False,
) -> Family:
    parts = text("help")

    return Family(
        name,
        build=lambda depth: Gpt(depth, parts.classes, relu=relu, tied=tied, post_norm=post_norm),
        minibatches=lambda seed: Stream(parts.train, seed),
        compute_loss=lambda model, minibatch: F.cross_entropy(
            model(minibatch[0]).flatten(0, 1), minibatch[1].flatten()
        ),
        measure=lambda network: (
            measure(network, parts.validation.in_order(256)),
            measure(network, parts.test.in_order(256)),
        ),
        steps=steps,
        rate=rate,
        weight_decay=weight_decay,
    )


def main(folder: tyro.conf.Positional[Path], steps: int = 2400) -> None:
    """All that is missing."""
    torch.set_num_threads(1)
    results = Results(folder / f"recipes-{steps}.jsonl")
    recipes = [
        make_recipe("base", steps),
        make_recipe("half-rate", steps, rate=RATE / 2),
        make_recipe("no-weight-decay", steps, weight_decay=0.0),
        make_recipe("relu", steps, relu=True),
        make_recipe("tied-head", steps, tied=True),
        make_recipe("post-norm", steps, post_norm=True),
    ]
    climbs = [Training(recipe, DEPTHS, SHARE, seed) for recipe in recipes for seed in SEEDS]
    alone = [Training(recipe, (depth,), ALONE, seed) for recipe in recipes for seed in SEEDS for depth in DEPTHS]
    results.train(climbs + alone)

    def find_mean(recipe: Family, depth: int, share: float) -> float:
        found = [results.find(recipe.name, depth, share, recipe.rate, seed) for seed in SEEDS]
        return float(np.mean([one.test for one in found if one is not None]))

    # Losses of both ways, and how their rankings agree.
    titles = [f"{way}, {depth}" for depth in DEPTHS for way in ("alone", "rung")]
    table = Table("recipe", *titles, box=None)
    means = {
        (recipe.name, depth, share): find_mean(recipe, depth, share)
        for recipe in recipes
        for depth in DEPTHS
        for share in (ALONE, SHARE)
    }
    for recipe in recipes:
        cells = [f"{means[recipe.name, depth, share]:.4f}" for depth in DEPTHS for share in (ALONE, SHARE)]
        table.add_row(recipe.name, *cells)
    Console(width=130).print(table)
    for depth in DEPTHS:
        alone, rungs = ([means[recipe.name, depth, share] for recipe in recipes] for share in (ALONE, SHARE))
        pairs = list(combinations(range(len(recipes)), 2))
        agree = np.mean([(alone[one] < alone[two]) == (rungs[one] < rungs[two]) for one, two in pairs])
        bias = np.mean([rung / twin - 1 for rung, twin in zip(rungs, alone, strict=True)])
        tau = kendalltau(alone, rungs).statistic
        print_line(Console(), f"{depth} blocks: tau {tau:.2f}, signs agree {agree:.0%}, rungs {bias:+.2%}")


if __name__ == "__main__":
    tyro.cli(main)
