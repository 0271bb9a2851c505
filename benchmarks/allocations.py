"""Does it matter where a ConvNet is wide? Static widths of its three stages on digits, at equal parameters.

    python benchmarks/allocations.py FOLDER

Every allocation of {4, 8, 16} channels to three stages is trained from scratch with every seed. Beside a uniform one is
set the allocation of at most as many parameters that is best on validation data by the other seeds. Results are kept,
one JSON line each; stopped, the same command goes on. Started several times at once, it shares its work.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from zoo.data import Labelled, load

from esper.dash.output import print_line
from esper.train.workers import prepare_process

WIDTHS, SEEDS = (4, 8, 16), (0, 1, 2, 3)
ALLOCATIONS = tuple(itertools.product(WIDTHS, repeat=3))
EPOCHS, BATCH, RATE, WEIGHT_DECAY = 15, 64, 3e-3, 0.01


@dataclass(frozen=True)
class Result:
    """One network."""

    widths: tuple[int, int, int]
    seed: int
    validation: float
    test: float
    parameters: int


def build(widths: tuple[int, int, int]) -> nn.Sequential:
    """Two convolutions with normalisation per stage, half the resolution behind the first two."""
    parts: list[nn.Module] = []
    for channels, width, stage in zip((1, *widths), widths, range(3), strict=False):
        for inputs in (channels, width):
            parts += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        parts += [nn.MaxPool2d(2)] if stage < 2 else []
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def train(widths: tuple[int, int, int], seed: int) -> Result:
    """From scratch."""
    splits = load("digits")
    torch.manual_seed(seed)
    net, rng = build(widths), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(EPOCHS):
        for inputs, labels in splits.train.epoch(BATCH, rng):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    net.eval()
    size = sum(parameter.numel() for parameter in net.parameters())
    return Result(widths, seed, measure(net, splits.validation), measure(net, splits.test), size)


@torch.no_grad()
def measure(net: nn.Module, examples: Labelled) -> float:
    """Share of right answers."""
    right = [(net(inputs).argmax(1) == labels).sum().item() for inputs, labels in examples.in_order(512)]
    return sum(right) / len(examples)


def tabulate(results: list[Result]) -> list[str]:
    """Lines of a Markdown table: means ± deviations over seeds, and the mean difference ± its standard error."""
    lines = [
        "| uniform width | parameters | test accuracy | best by the other seeds | less uniform | allocations chosen |",
        "|---|---|---|---|---|---|",
    ]
    known = {(one.widths, one.seed): one for one in results}
    seeds = sorted({one.seed for one in results})
    for width in WIDTHS[1:]:
        uniform = [known[(width,) * 3, seed] for seed in seeds]
        within = [widths for widths in ALLOCATIONS if known[widths, seeds[0]].parameters <= uniform[0].parameters]
        chosen = [
            max(
                within,
                key=lambda widths: np.mean([known[widths, other].validation for other in seeds if other != seed]),
            )
            for seed in seeds
        ]
        best = [100 * known[widths, seed].test for widths, seed in zip(chosen, seeds, strict=True)]
        plain = [100 * one.test for one in uniform]
        less = np.subtract(best, plain)
        lines.append(
            f"| {width} | {uniform[0].parameters:,} | {np.mean(plain):.1f} ± {np.std(plain, ddof=1):.1f} "
            f"| {np.mean(best):.1f} ± {np.std(best, ddof=1):.1f} "
            f"| {np.mean(less):+.1f} ± {np.std(less, ddof=1) / math.sqrt(len(less)):.1f} "
            f"| {', '.join('-'.join(map(str, widths)) for widths in chosen)} |"
        )
    return lines


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Train what is missing, and compare."""
    prepare_process()
    file, console = ResultFile(folder / "allocations.jsonl", Result), Console(width=160)

    def run(task: tuple[tuple[int, int, int], int]) -> None:
        file.add(result := train(*task))
        print_line(console, f"{result}")

    tasks = list(itertools.product(ALLOCATIONS, SEEDS))
    file.run_missing(tasks, lambda task: task in {(one.widths, one.seed) for one in file.results}, run)
    for line in tabulate(file.results):
        print_line(console, line)


if __name__ == "__main__":
    tyro.cli(main)
