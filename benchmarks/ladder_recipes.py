"""Does a ladder rank recipes at every size as separate trainings do? Six recipes, three seeds, depths 1, 2, 4 and 8.

    python benchmarks/ladder_recipes.py FOLDER            # --steps 4800 for as long as in benchmarks/ladder.py

Each recipe differs from the first in one thing: half the learning rate, no weight decay, ReLU, a head tied to the
embedding, the norm behind the sum. Means over seeds of losses on the text's last tenth; by size, Kendall's tau between
the two rankings, the share of pairs of recipes whose difference has the same sign, and by how much rungs are above
their twins. Nothing is chosen, so there is no seed that chooses. What was killed goes on where it was; started
several times at once, it shares its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from families import ALONE, DEPTHS, Family, Results, Training
from rich.console import Console
from scipy.stats import kendalltau
from tiny_gpt import HEADS, WIDTH, Stream, measure, text
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import WINDOW
from zoo.hosts import SelfAttention

from esper.dash.output import print_line

SEEDS, SHARE, RATE = (1, 2, 3), 0.2, 12e-3
RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "half-rate": {"rate": RATE / 2},
    "no-weight-decay": {"weight_decay": 0.0},
    "relu": {"relu": True},
    "tied-head": {"tied": True},
    "post-norm": {"post_norm": True},
}
"""How they differ from the first."""


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
    """Train all that is missing, and print the tables.

    Args:
        folder: For the results.
        steps: Of each network alone.
    """
    torch.set_num_threads(1)
    results = Results(folder / f"recipes-{steps}.jsonl")
    recipes = [make_recipe(name, steps, **changes) for name, changes in RECIPES.items()]
    climbs = [Training(recipe, DEPTHS, SHARE, seed) for recipe in recipes for seed in SEEDS]
    alone = [Training(recipe, (depth,), ALONE, seed) for recipe in recipes for seed in SEEDS for depth in DEPTHS]
    results.train(climbs + alone)

    for line in (*tabulate(results, list(RECIPES)), "", *tabulate_bias(results, list(RECIPES))):
        print_line(Console(width=120), line)


def tabulate(results: Results, recipes: Sequence[str]) -> list[str]:
    """Lines of a Markdown table: by size, how rankings of recipes by rungs agree with those by separate trainings.

    The tau of two seeds, the mean over pairs of seeds of separate trainings, is what chance allows.
    """
    lines = ["| blocks | Kendall's tau | same sign | rungs beside alone | tau of two seeds |", "|---" * 5 + "|"]
    for depth in DEPTHS:
        alone, rungs = ([find_mean(results, one, depth, share) for one in recipes] for share in (ALONE, SHARE))
        by_seed = [[find_mean(results, one, depth, ALONE, (seed,)) for one in recipes] for seed in SEEDS]
        of_seeds = np.mean([kendalltau(one, two).statistic for one, two in combinations(by_seed, 2)])
        pairs = list(combinations(range(len(recipes)), 2))
        agree = np.mean([(alone[one] < alone[two]) == (rungs[one] < rungs[two]) for one, two in pairs])
        bias = [rung / twin - 1 for rung, twin in zip(rungs, alone, strict=True)]
        tau = kendalltau(alone, rungs).statistic
        between = f"{np.mean(bias):+.1%} ({min(bias):+.1%} to {max(bias):+.1%})"
        lines.append(f"| {depth} | {tau:.2f} | {agree:.0%} | {between} | {of_seeds:.2f} |")
    return lines


def tabulate_bias(results: Results, recipes: Sequence[str]) -> list[str]:
    """Lines of a Markdown table: by recipe, how much more rungs lose than networks alone.

    Means and standard errors of relative differences, which are paired by seed. The first rung is the network alone.
    """
    lines = [f"| | {' | '.join(f'{depth} blocks' for depth in DEPTHS[1:])} |", "|---" * len(DEPTHS) + "|"]
    for recipe in recipes:
        cells = list[str]()
        for depth in DEPTHS[1:]:
            rungs, alone = (
                np.array([find_mean(results, recipe, depth, share, (seed,)) for seed in SEEDS])
                for share in (SHARE, ALONE)
            )
            more = rungs / alone - 1
            cells.append(f"{more.mean():+.1%} ± {more.std(ddof=1) / math.sqrt(len(more)):.1%}")
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return lines


def find_mean(results: Results, recipe: str, depth: int, share: float, seeds: Sequence[int] = SEEDS) -> float:
    """Test loss, mean over seeds."""
    key = (recipe, depth, share)
    found = [one.test for one in results.results if (one.family, one.depth, one.share) == key and one.seed in seeds]
    return float(np.mean(found))


if __name__ == "__main__":
    tyro.cli(main)
