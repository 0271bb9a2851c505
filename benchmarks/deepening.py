"""Is a language model that grows deeper better than the best fixed depth at equal FLOPs? The cheap trial first.

    python benchmarks/deepening.py FOLDER fixed      # depths x learning rates
    python benchmarks/deepening.py FOLDER sweep      # times x places x kinds of growth, at the best learning rate
    python benchmarks/deepening.py FOLDER final      # the best of both again, with seeds that chose nothing
    python benchmarks/deepening.py FOLDER table

A causal transformer on the characters of Python's documentation. Every run has the same budget of training FLOPs,
counted by the rule of `grower.spending`, and the same schedule by its share: warm-up, stable, decay. Growth is by hand:
at a share of the budget, behind blocks of the network. Validation loss, in nats per character, is what chooses, the
test loss of the finalists what is reported. Runs that are done are kept, one JSON line each; `--workers` share them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper.grower.spending import Spending
from esper.tasks.practice.examples import Examples, Splits
from esper.tasks.practice.hosts import TransformerBlock
from esper.tasks.practice.registry import DataAccess, get_task
from esper.tasks.practice.text import LENGTH
from esper.ui.output import say

WIDTH, HEADS, BATCH, WEIGHT_DECAY = 16, 2, 16, 0.1
BUDGET = 1e12
"""Training FLOPs of every run."""
DEPTHS, RATES = (1, 2, 4, 8), (6e-3, 12e-3)
TIMES, PLACES, KINDS = (0.1, 0.3, 0.6), ("all",), ("block_copy", "block_zero", "random")
CHOOSING, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)
Step = Literal["fixed", "sweep", "final", "table"]


@dataclass(frozen=True)
class Plan:
    """One training."""

    depth: int
    """At first."""
    rate: float
    seed: int
    time: float | None = None
    """Share of the budget after which it grows; None: never."""
    place: str = ""
    """Behind the first block, the last, or each."""
    kind: str = ""
    """A blueprint, or ``random``: a block with fresh values."""


@dataclass(frozen=True)
class Result:
    """What came of it."""

    plan: Plan
    validation: float
    test: float
    blocks: int
    steps: int
    flops: float


class Gpt(nn.Module):
    """Indices int64 ``[B, T]`` to logits ``[B, T, classes]``."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(classes, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, HEADS, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.characters(indices) + self.positions.weight[: indices.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@cache
def text() -> Splits:
    """Python's documentation, split by position."""
    return get_task("charlm").load(DataAccess())


def train(plan: Plan) -> Result:
    """Spend the budget on one network."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    splits, rng = text(), np.random.default_rng(plan.seed)
    slots = {f"blocks.{index}": ["block_copy", "block_zero"] for index in range(plan.depth)}
    model = esper.attach(Gpt(plan.depth, splits.classes), slots, torch.zeros(2, LENGTH, dtype=torch.int64))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=plan.rate), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    model.link(optimizer)
    spending = Spending(model, BUDGET, None)
    scheduler = LambdaLR(optimizer, lambda _: esper.warmup_stable_decay(spending.share))
    steps = 0
    for inputs, targets in endless(splits.train, rng):
        if plan.time is not None and not model.seeds and spending.share >= plan.time:
            grow(model, plan)
        if spending.share >= 1:
            break
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        steps += 1
    flops, blocks = spending.flops, plan.depth + len(model.seeds)
    return Result(plan, measure(model, splits.validation), measure(model, splits.test), blocks, steps, flops)


def endless(part: Examples, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches, epoch after epoch."""
    while True:
        yield from part.epoch(BATCH, rng)


def grow(model: esper.GrowingModel, plan: Plan) -> None:
    """Place blocks behind those that the plan says, at once and at full weight."""
    every = list(model.slots.values())
    chosen = {"first": every[:1], "last": every[-1:], "all": every}[plan.place]
    for slot in chosen:
        seed = slot.germinate("block_copy" if plan.kind == "random" else plan.kind, alpha=1.0)
        if plan.kind == "random":
            fresh = TransformerBlock(WIDTH, HEADS, causal=True)
            with torch.no_grad():
                for old, new in zip(seed.blueprint.block.parameters(), fresh.parameters(), strict=True):
                    old.copy_(new)


@torch.no_grad()
def measure(model: nn.Module, part: Examples) -> float:
    """Mean loss per character."""
    model.eval()
    losses, count = 0.0, 0
    for inputs, targets in part.in_order(256):
        losses += float(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return losses / count


def main(folder: tyro.conf.Positional[Path], step: tyro.conf.Positional[Step], workers: int = 2) -> None:
    """Run a step of the trial, or what is missing of it; `table` prints what is known."""
    store, console = Store(folder / "deepening.jsonl"), Console(width=110)
    if step != "table":
        with ProcessPoolExecutor(workers) as pool:
            for result in pool.map(train, store.missing(PLANS[step](store))):
                store.add(result)
                say(console, describe(result))
    show(store, console)


class Store:
    """Results, kept as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.results = [Result(Plan(**one.pop("plan")), **one) for one in map(json.loads, lines)]

    def missing(self, plans: Iterable[Plan]) -> list[Plan]:
        done = {result.plan for result in self.results}
        return [plan for plan in plans if plan not in done]

    def add(self, result: Result) -> None:
        self.results.append(result)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def best(self, *, grown: bool, count: int = 1) -> list[Plan]:
        """Those with the least validation loss of the seed that chooses."""
        known = [one for one in self.results if one.plan.seed == CHOOSING and (one.plan.time is not None) == grown]
        return [one.plan for one in sorted(known, key=lambda one: one.validation)[:count]]

    def rate_of(self, depth: int) -> float:
        """The best one of a fixed depth."""
        known = [one for one in self.results if one.plan.depth == depth and one.plan.time is None]
        return min(known, key=lambda one: one.validation).plan.rate


def plan_fixed(_: Store) -> list[Plan]:
    return [Plan(depth, rate, CHOOSING) for depth, rate in itertools.product(DEPTHS, RATES)]


def plan_sweep(store: Store) -> list[Plan]:
    """From half the best depth, whose own best learning rate it has."""
    (best,) = store.best(grown=False)
    depth = max(best.depth // 2, 1)
    grid = itertools.product(TIMES, PLACES if depth > 1 else ("all",), KINDS)
    return [Plan(depth, store.rate_of(depth), CHOOSING, *one) for one in grid]


def plan_final(store: Store) -> list[Plan]:
    """The best of the fixed depths, and the best that grew, which may have been lucky."""
    finalists = [*store.best(grown=False), *store.best(grown=True)]
    return [Plan(**{**asdict(plan), "seed": seed}) for seed in FINAL_SEEDS for plan in finalists]


PLANS = {"fixed": plan_fixed, "sweep": plan_sweep, "final": plan_final}


def describe(result: Result) -> str:
    plan = result.plan
    grown = "" if plan.time is None else f" {plan.kind} {plan.place} at {plan.time:.0%}"
    return f"depth {plan.depth}{grown}, rate {plan.rate:g}, seed {plan.seed}: validation {result.validation:.4f}"


def show(store: Store, console: Console) -> None:
    """All that chose, best first, and the finalists beside the best fixed depth."""
    table = Table("training", "validation", "blocks", "steps", box=None)
    for result in sorted(store.results, key=lambda one: one.validation):
        if result.plan.seed == CHOOSING:
            table.add_row(
                describe(result).partition(":")[0], f"{result.validation:.4f}", str(result.blocks), str(result.steps)
            )
    console.print(table)
    finals = {
        plan: [find(store, plan, seed) for seed in FINAL_SEEDS]
        for plan in dict.fromkeys(
            Plan(**{**asdict(one.plan), "seed": CHOOSING}) for one in store.results if one.plan.seed != CHOOSING
        )
    }
    fixed = next((found for plan, found in finals.items() if plan.time is None), None)
    for found in finals.values():
        less = np.array([one.test / other.test - 1 for one, other in zip(found, fixed or found, strict=True)])
        error = less.std(ddof=1) / math.sqrt(len(less))
        losses = [one.test for one in found]
        said = describe(found[0]).partition(", seed")[0]
        spread = f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
        say(console, f"{said}: test {spread}, {less.mean():+.2%} ± {error:.2%} beside the best fixed depth")


def find(store: Store, plan: Plan, seed: int) -> Result:
    return next(one for one in store.results if one.plan == Plan(**{**asdict(plan), "seed": seed}))


if __name__ == "__main__":
    tyro.cli(main)
