"""Vision transformers of several depths from one training, beside each alone, on Fashion-MNIST or digits.

    python benchmarks/ladder_vit.py FOLDER            # learning rates, shares, then five seeds
    python benchmarks/ladder_vit.py FOLDER --task digits

Depths 1, 2, 4 and 8 of width 24; 10,000 examples of Fashion-MNIST, or all of digits. Seed 0 chooses by validation
loss: a learning rate per depth, the ladder's rate, and its share, the least by which every rung is within 1% of the
loss of its twin, or else the greatest. Seeds 1 to 5 and the test data, which chose nothing, are reported as accuracy in
percent. What was killed goes on where it was; started several times at once, it shares its work.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from families import ALONE, DEPTHS, Family, Result, Results, Training
from rich.console import Console
from rich.table import Table
from tiny_gpt import Stream
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import load
from zoo.hosts import PATCHES, TransformerBlock

from esper.dash.output import print_line

WIDTH, HEADS, EXAMPLES = 24, 4, 10_000
RATES, SHARES = (2e-3, 4e-3, 8e-3), (0.2, 0.35, 0.5)
ENOUGH = 0.01
CHOOSING, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)


class ViT(nn.Module):
    """Images ``[B, 1, H, W]`` as 16 patches; the mean over patches to logits ``[B, classes]``."""

    def __init__(self, depth: int, size: int, classes: int) -> None:
        super().__init__()
        side = size // PATCHES
        self.patches, self.places = nn.Conv2d(1, WIDTH, side, stride=side), nn.Embedding(PATCHES**2, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, HEADS) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden).mean(1))


def make_family(task: str, steps: int) -> Family:
    """With any learning rate."""
    parts = load(task)
    train = replace(parts.train, inputs=parts.train.inputs[:EXAMPLES], labels=parts.train.labels[:EXAMPLES])

    @torch.no_grad()
    def measure(network: nn.Module) -> tuple[float, float]:
        losses = [F.cross_entropy(network(x), y, reduction="sum") for x, y in parts.validation.in_order(500)]
        right = [(network(x).argmax(1) == y).sum() for x, y in parts.test.in_order(500)]
        return float(sum(losses)) / len(parts.validation), 100 * float(sum(right)) / len(parts.test)

    return Family(
        task,
        build=lambda depth: ViT(depth, train.inputs.shape[-1], parts.classes),
        minibatches=lambda seed: Stream(train, seed),
        compute_loss=lambda model, minibatch: F.cross_entropy(model(minibatch[0]), minibatch[1]),
        measure=measure,
        steps=steps,
        rate=math.nan,
    )


def main(
    folder: tyro.conf.Positional[Path], task: Literal["fashion-mnist", "digits"] = "fashion-mnist", steps: int = 6000
) -> None:
    """All that is missing; a minibatch has 16 examples."""
    torch.set_num_threads(1)
    family, results = make_family(task, steps), Results(folder / f"vit-{task}.jsonl")

    def get(depth: int, share: float, rate: float, seed: int) -> Result:
        found = results.find(task, depth, share, rate, seed)
        assert found is not None
        return found

    # Seed 0 chooses rates, and the ladder's share at the rate that is best in the mean.
    results.train(
        [Training(replace(family, rate=rate), (depth,), ALONE, CHOOSING) for rate in RATES for depth in DEPTHS]
    )
    best = {depth: min(RATES, key=lambda rate: get(depth, ALONE, rate, CHOOSING).validation) for depth in DEPTHS}
    rate = min(RATES, key=lambda rate: sum(get(depth, ALONE, rate, CHOOSING).validation for depth in DEPTHS))
    for share in SHARES:
        results.train([Training(replace(family, rate=rate), DEPTHS, share, CHOOSING)])
        rises = [
            get(depth, share, rate, CHOOSING).validation / get(depth, ALONE, best[depth], CHOOSING).validation - 1
            for depth in DEPTHS
        ]
        if max(rises) <= ENOUGH:
            break
    # The others are reported.
    climbs = [Training(replace(family, rate=rate), DEPTHS, share, seed) for seed in FINAL_SEEDS]
    results.train(
        climbs + [Training(replace(family, rate=best[d]), (d,), ALONE, seed) for seed in FINAL_SEEDS for d in DEPTHS]
    )

    # Accuracy in percent, and differences in points.
    table = Table("blocks", "rate", "alone", "ladder", "beside alone", "FLOPs alone", "FLOPs so far", box=None)
    total = 0.0
    for depth in DEPTHS:
        alone = [get(depth, ALONE, best[depth], seed) for seed in FINAL_SEEDS]
        rungs = [get(depth, share, rate, seed) for seed in FINAL_SEEDS]
        more = [rung.test - twin.test for rung, twin in zip(rungs, alone, strict=True)]
        total += alone[0].flops
        table.add_row(
            str(depth),
            f"{best[depth]:g}",
            spread(alone),
            spread(rungs),
            f"{np.mean(more):+.2f} ± {np.std(more, ddof=1) / math.sqrt(len(more)):.2f}",
            f"{alone[0].flops:.3g}",
            f"{rungs[0].flops:.3g}",
        )
    Console(width=110).print(table)
    ladder = get(DEPTHS[-1], share, rate, FINAL_SEEDS[0]).flops
    print_line(
        Console(),
        f"{task}, share {share:g}, rate {rate:g}: all sizes alone {total:.3g} FLOPs, {1 - ladder / total:.0%} less",
    )


def spread(found: list[Result]) -> str:
    """Mean and standard deviation over seeds."""
    values = [one.test for one in found]
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


if __name__ == "__main__":
    tyro.cli(main)
