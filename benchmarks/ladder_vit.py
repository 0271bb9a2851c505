"""Vision transformers of several depths from one training, beside each alone, on Fashion-MNIST or digits.

    python benchmarks/ladder_vit.py FOLDER            # learning rates, shares, then five seeds
    python benchmarks/ladder_vit.py FOLDER --task digits

Depths 1, 2, 4 and 8 of width 24; 10,000 examples of Fashion-MNIST, or all of digits. Seed 0 chooses by validation
loss: a learning rate per depth, and the ladder's rate, that which is best in the mean. Seeds 1 to 5 and the test data,
which chose nothing, are reported for two shares of the steps, as accuracy in percent. What was killed goes on where it
was; started several times at once, it shares its work.
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
from tiny_gpt import Stream
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import load
from zoo.hosts import PATCHES, TransformerBlock

from esper.dash.output import print_line

WIDTH, HEADS, EXAMPLES = 24, 4, 10_000
RATES, SHARES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3), (0.2, 0.5)
STEPS = 6000
"""Of each network alone. Results of another number are kept in a file of their own."""
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


def make_family(task: str, steps: int, device: str) -> Family:
    """With any learning rate."""
    parts = load(task).to(torch.device(device))
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
        device=device,
    )


def main(
    folder: tyro.conf.Positional[Path],
    task: Literal["fashion-mnist", "digits"] = "fashion-mnist",
    steps: int = STEPS,
    device: str = "cpu",
) -> None:
    """Train all that is missing, and print a table.

    Args:
        folder: For the results.
        task: The data.
        steps: Of each network alone, with 16 examples each.
        device: Trains the networks, such as cuda.
    """
    torch.set_num_threads(1)
    name = f"vit-{task}" if steps == STEPS else f"vit-{task}-{steps}"
    family, results = make_family(task, steps, device), Results(folder / f"{name}.jsonl", device)
    results.train(
        [Training(replace(family, rate=rate), (depth,), ALONE, CHOOSING) for rate in RATES for depth in DEPTHS]
    )
    best, rate = choose_rates(results, task)
    alone = [Training(replace(family, rate=best[d]), (d,), ALONE, seed) for seed in FINAL_SEEDS for d in DEPTHS]
    climbs = [Training(replace(family, rate=rate), DEPTHS, share, seed) for share in SHARES for seed in FINAL_SEEDS]
    results.train(alone + climbs[: len(FINAL_SEEDS)])  # a table can be made then
    results.train(climbs)
    for line in tabulate(results, task):
        print_line(Console(width=120), line)
    print_line(Console(), f"rates alone {best}, of the ladder {rate:g}")


def choose_rates(results: Results, task: str) -> tuple[dict[int, float], float]:
    """By the validation loss of seed 0: the best rate of each depth alone, and the ladder's, the best in the mean."""

    def get_loss(depth: int, rate: float) -> float:
        found = results.find(task, depth, ALONE, rate, CHOOSING)
        assert found is not None
        return found.validation

    best = {depth: min(RATES, key=lambda rate: get_loss(depth, rate)) for depth in DEPTHS}
    return best, min(RATES, key=lambda rate: sum(get_loss(depth, rate) for depth in DEPTHS))


def tabulate(results: Results, task: str) -> list[str]:
    """Lines of a Markdown table: accuracy alone, in percent, and by share what rungs have more, in points, and cost.

    Means and standard deviations of accuracy; means and standard errors of differences, which are paired by seed.
    """
    best, rate = choose_rates(results, task)
    alone = {depth: find_finals(results, task, depth, ALONE, best[depth]) for depth in DEPTHS}
    total = sum(found[0].flops for found in alone.values())
    lines = [
        f"| | share | {' | '.join(f'{depth} blocks' for depth in DEPTHS)} | FLOPs | saved |",
        "|---" * (4 + len(DEPTHS)) + "|",
        f"| alone: accuracy | | {' | '.join(spread(found) for found in alone.values())} | {total:.3g} | |",
    ]
    for share in SHARES:
        rungs = {depth: find_finals(results, task, depth, share, rate) for depth in DEPTHS}
        if any(len(found) < len(FINAL_SEEDS) for found in rungs.values()):
            continue
        flops = rungs[DEPTHS[-1]][0].flops
        cells = list[str]()
        for depth in DEPTHS:
            more = [rung.test - twin.test for rung, twin in zip(rungs[depth], alone[depth], strict=True)]
            cells.append(f"{np.mean(more):+.2f} ± {np.std(more, ddof=1) / math.sqrt(len(more)):.2f}")
        lines.append(f"| ladder | {share:g} | {' | '.join(cells)} | {flops:.3g} | {1 - flops / total:.0%} |")
    return lines


def find_finals(results: Results, task: str, depth: int, share: float, rate: float) -> list[Result]:
    """Those of the seeds that chose nothing."""
    found = [results.find(task, depth, share, rate, seed) for seed in FINAL_SEEDS]
    return [one for one in found if one is not None]


def spread(found: list[Result]) -> str:
    """Mean and standard deviation over seeds."""
    values = [one.test for one in found]
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


if __name__ == "__main__":
    tyro.cli(main)
