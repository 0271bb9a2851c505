"""Is a language model that grows deeper better than the best fixed depth at equal FLOPs?

    python benchmarks/deepening.py FOLDER fixed      # depths x learning rates
    python benchmarks/deepening.py FOLDER sweep      # times x places x kinds of growth, at the best learning rate
    python benchmarks/deepening.py FOLDER final      # the best few of both again, with seeds that chose nothing
    python benchmarks/deepening.py FOLDER rules      # growth by rules, with the same seeds
    python benchmarks/deepening.py FOLDER other      # the best of all of them on another text, with the same settings
    python benchmarks/deepening.py FOLDER table

Every run has the same budget of training FLOPs, counted by `esper.grower.spending`, and the same schedule by its share:
warm-up, stable, decay. Growth in the sweep is by hand: at a share of the budget, behind blocks of the network. What
rules take to decide is counted. Validation loss, in nats per character, is what chooses, the test loss of the finalists
what is reported, there and, with the same settings, on another text. Runs that are done are kept, one JSON line each.
Started several times at once, a command shares its work.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from rich.table import Table
from tiny_gpt import (
    CHOOSING_TEXT,
    HEADS,
    OTHER_TEXT,
    WIDTH,
    Gpt,
    TextName,
    attach,
    endless,
    learn,
    make_optimizer,
    measure,
    text,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from zoo.hosts import TransformerBlock

import esper
from esper.dash.output import print_line
from esper.grower.spending import Spending
from esper.ladders.plan import warmup_stable_decay

BUDGET = 1e12
"""Training FLOPs of every run."""
DEPTHS, RATES = (1, 2, 4, 5, 6, 7, 8, 16), (6e-3, 12e-3, 24e-3)
FIRST_DEPTH = 4
"""Of all that grows."""
TIMES, PLACES, KINDS = (0.1, 0.3, 0.6, 0.8), ("first", "last", "all"), ("block_copy", "block_zero", "random")
CHOOSING, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)
FINALISTS = 2
"""Fixed trainings, of which the one with the best mean is what growth is compared with."""
CHECKS = 50
"""How often rules ask themselves whether to grow."""
HELD = 128
"""Validation sequences that rules measure on."""
Step = Literal["fixed", "sweep", "final", "rules", "other", "table"]


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
    rule: str = ""
    """That decides instead."""
    text: TextName = CHOOSING_TEXT


@dataclass(frozen=True)
class Result:
    """What came of it."""

    plan: Plan
    validation: float
    test: float
    blocks: int
    steps: int
    flops: float


class Training:
    """One network that never grows, or by hand: when and where the plan says."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.text = plan, text(plan.text)
        self.minibatches = endless(self.text.train, np.random.default_rng(plan.seed))
        self.model = attach(Gpt(plan.depth, self.text.classes))
        self.optimizer = make_optimizer(self.model, plan.rate)
        self.spending = Spending(self.model, BUDGET)

    def decide(self) -> None:
        """Before each step."""
        if self.plan.time is not None and not self.model.seeds and self.spending.share >= self.plan.time:
            grow(self.model, self.plan.place, self.plan.kind)

    def hear(self, loss: Tensor) -> None:
        """After each step, its loss."""

    def finish(self) -> None:
        """After all."""

    def evaluate(self, model: nn.Module) -> float:
        """What rules know of validation data."""
        return measure(model, [next(self.text.validation.in_order(HELD))])


class GrowerTraining(Training):
    """As a rule decides that comes with `esper.Grower`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.losses = list[Tensor]()
        """Since the last decision."""
        self.grower = esper.Grower(
            self.model,
            self.optimizer,
            controller=plan.rule,
            evaluate=self.evaluate,
            classes=self.text.classes,
            horizon=CHECKS,
            seed=plan.seed,
            training_flops=BUDGET,
        )
        self.spending = self.grower.spending

    def hear(self, loss: Tensor) -> None:
        self.losses.append(loss)
        if self.spending.share * CHECKS >= self.grower.decisions + 1:
            self.grower.step(train_loss=torch.stack(self.losses).mean())
            self.losses = []

    def finish(self) -> None:
        self.grower.finish()


RULES = {
    "": Training,
    "all_at_plateau": GrowerTraining,
    "look": GrowerTraining,
}


def train(plan: Plan) -> Result:
    """Spend the budget on one network."""
    torch.set_num_threads(1)
    one = RULES[plan.rule](plan)
    scheduler = LambdaLR(one.optimizer, lambda _: warmup_stable_decay(one.spending.share))
    steps = 0
    while True:
        one.decide()
        if one.spending.share >= 1:
            break
        one.model.train()
        loss = learn(one.model, one.optimizer, next(one.minibatches))
        scheduler.step()
        one.hear(loss)
        steps += 1
    one.finish()
    flops, blocks = one.spending.flops, plan.depth + len(one.model.seeds)
    validation, test = (measure(one.model, part.in_order(256)) for part in (one.text.validation, one.text.test))
    return Result(plan, validation, test, blocks, steps, flops)


def grow(model: esper.GrowingModel, place: str, kind: str) -> None:
    """Place blocks at once and at full weight."""
    every = list(model.slots.values())
    for slot in {"first": every[:1], "last": every[-1:], "all": every}[place]:
        seed = slot.germinate("block_copy" if kind == "random" else kind, alpha=1.0)
        if kind == "random":
            fresh = TransformerBlock(WIDTH, HEADS, causal=True)
            with torch.no_grad():
                for old, new in zip(seed.parameters(), fresh.parameters(), strict=True):
                    old.copy_(new)


def main(folder: tyro.conf.Positional[Path], step: tyro.conf.Positional[Step]) -> None:
    """Run a step of the trial, or what is missing of it; `table` prints what is known."""
    store, console = Store(folder / "deepening.jsonl"), Console(width=110)

    def run(plan: Plan) -> None:
        store.add(result := train(plan))
        print_line(console, describe(result))

    if step != "table":
        store.run_missing(PLANS[step](store), lambda plan: plan in {one.plan for one in store.results}, run)
    show(store, console)


class Store(ResultFile[Result]):
    """Results, kept as JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Result)

    def rank(self, step: str) -> list[Plan]:
        """What the steps `fixed`, `sweep` or `rules` have tried with the seed that chooses, best first."""
        known = [one for one in self.results if one.plan.seed == CHOOSING and kind_of(one.plan) == step]
        if not known:
            raise SystemExit(f"nothing is known of step {step} yet: run that before")
        return [one.plan for one in sorted(known, key=lambda one: one.validation)]

    def best_fixed(self, text: TextName = CHOOSING_TEXT) -> Plan:
        """Of the fixed trainings by seeds that chose nothing before the one with the best mean validation loss."""
        known = [one.plan for one in self.results if one.plan.seed != CHOOSING and one.plan.text == text]
        fixed = {replace(plan, seed=CHOOSING): None for plan in known if kind_of(plan) == "fixed"}
        if not fixed:
            raise SystemExit(
                f"nothing is known of step {'final' if text == CHOOSING_TEXT else 'other'} yet: run that before"
            )
        return min(fixed, key=lambda plan: np.mean([one.validation for one in self.find(plan).values()]))

    def find(self, plan: Plan) -> dict[int, Result]:
        """What is known of a plan by the seeds that chose nothing."""
        found = {one.plan.seed: one for one in self.results if replace(one.plan, seed=plan.seed) == plan}
        return {seed: one for seed, one in found.items() if seed != CHOOSING}

    def rate_of(self, depth: int) -> float:
        """The best one of a fixed depth."""
        return next(plan.rate for plan in self.rank("fixed") if plan.depth == depth)


def kind_of(plan: Plan) -> str:
    """The step that tries such a training."""
    return "rules" if plan.rule else "fixed" if plan.time is None else "sweep"


def plan_fixed(_: Store) -> list[Plan]:
    return [Plan(depth, rate, CHOOSING) for depth, rate in itertools.product(DEPTHS, RATES)]


def plan_sweep(store: Store) -> list[Plan]:
    """At the learning rate that is best for the depth at first."""
    rate = store.rate_of(FIRST_DEPTH)
    return [Plan(FIRST_DEPTH, rate, CHOOSING, *one) for one in itertools.product(TIMES, PLACES, KINDS)]


def plan_final(store: Store) -> list[Plan]:
    """The best few of the fixed depths, and the best that grew, which may have been lucky."""
    finalists = [*store.rank("fixed")[:FINALISTS], store.rank("sweep")[0]]
    return [replace(plan, seed=seed) for seed in FINAL_SEEDS for plan in finalists]


def plan_rules(store: Store) -> list[Plan]:
    """From where the sweep began."""
    rate, rules = store.rate_of(FIRST_DEPTH), [rule for rule in RULES if rule]
    return [Plan(FIRST_DEPTH, rate, seed, rule=rule) for seed in (CHOOSING, *FINAL_SEEDS) for rule in rules]


def plan_other(store: Store) -> list[Plan]:
    """The best fixed depth and those next to it, as another text may want another; the best that grew by hand, and the
    best rule."""
    fixed = store.best_fixed()
    place = DEPTHS.index(fixed.depth)
    near = [replace(fixed, depth=depth) for depth in DEPTHS[max(place - 1, 0) : place + 2]]
    plans = [*near, store.rank("sweep")[0], store.rank("rules")[0]]
    return [replace(plan, seed=seed, text=OTHER_TEXT) for seed in FINAL_SEEDS for plan in plans]


PLANS = {"fixed": plan_fixed, "sweep": plan_sweep, "final": plan_final, "rules": plan_rules, "other": plan_other}


def describe(result: Result) -> str:
    plan = result.plan
    grown = "" if plan.time is None else f" {plan.kind} {plan.place} at {plan.time:.0%}"
    grown = f" by {plan.rule}" if plan.rule else grown
    said = f"{plan.text}, depth {plan.depth}{grown}, rate {plan.rate:g}, seed {plan.seed}"
    return f"{said}: validation {result.validation:.4f}"


def show(store: Store, console: Console) -> None:
    """All that chose, best first, and the finalists beside the best fixed depth."""
    table = Table("training", "validation", "blocks", "steps", box=None)
    for result in sorted(store.results, key=lambda one: one.validation):
        if result.plan.seed == CHOOSING:
            table.add_row(
                describe(result).partition(":")[0], f"{result.validation:.4f}", str(result.blocks), str(result.steps)
            )
    console.print(table)
    plans = {replace(one.plan, seed=CHOOSING): None for one in store.results if one.plan.seed != CHOOSING}
    for plan in plans:
        found = store.find(plan)
        by_hand = replace(store.rank("sweep")[0], text=plan.text)
        rivals = {"the best fixed depth": store.best_fixed(plan.text), "the best by hand": by_hand}
        losses = [one.test for one in found.values()]
        spread = f"test {np.mean(losses):.4f} ± {np.std(losses, ddof=1) if len(losses) > 1 else 0:.4f}"
        compared = [beside(found, store.find(rival), name) for name, rival in rivals.items()]
        said = describe(found[min(found)]).partition(", seed")[0]
        print_line(console, f"{said}: {len(found)} seeds, {spread}{''.join(compared)}")


def beside(found: dict[int, Result], other: dict[int, Result], name: str) -> str:
    """Relative difference of test losses and its standard error over paired seeds; nothing, where there are too few."""
    less = [found[seed].test / other[seed].test - 1 for seed in found if seed in other]
    if len(less) < 2 or not any(less):
        return ""
    return f", {np.mean(less):+.2%} ± {np.std(less, ddof=1) / math.sqrt(len(less)):.2%} beside {name}"


if __name__ == "__main__":
    tyro.cli(main)
