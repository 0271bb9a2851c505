"""Is a small GPT whose MLPs grow wider better than the best fixed width at equal FLOPs?

    python benchmarks/ffn_width.py FOLDER choose     # fixed widths x learning rates, by one seed
    python benchmarks/ffn_width.py FOLDER final      # the best of them beside growth, by seeds that chose nothing
    python benchmarks/ffn_width.py FOLDER table

Every run has the same budget of training FLOPs, counted by `esper.Spending`, and the same schedule by its share:
warm-up, stable, decay. All MLPs of the network double their width at shares of the budget, by `units_K` at full weight,
which become part of their layers before the next doubling; Adam's moments become part of theirs. Validation loss, in
nats per character, is what chooses; the test loss is reported. Runs that are done are kept, one JSON line each.
Started several times at once, a command shares its work.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from tiny_gpt import CHOOSING_TEXT, WIDTH, Gpt, endless, learn, make_adamw, measure, text
from torch import nn
from zoo.data import WINDOW

import esper
from esper.dash.output import print_line

BUDGET = 1e11
"""Training FLOPs of every run."""
DEPTH = 2
WIDTHS = tuple(multiple * WIDTH for multiple in (1, 2, 4, 8))
"""Hidden units of every MLP."""
RATES = (12e-3, 24e-3, 48e-3)
TIME = 0.3
"""Share of the budget after which the width doubles."""
THROUGHOUT = (0.1, 0.2, 0.3)
"""The same, where it doubles three times."""
CHOOSING, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)
FINALISTS = 2
"""Fixed widths, of which the one with the best mean validation loss is what growth is compared with."""
Step = Literal["choose", "final", "table"]


@dataclass(frozen=True)
class Plan:
    """One training."""

    width: int
    """At first."""
    times: tuple[float, ...]
    """Shares of the budget after which the width doubles."""
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """What it is in tables."""
        widths = [self.width * 2**step for step in range(len(self.times) + 1)]
        shares = ", ".join(f"{share:.0%}" for share in self.times)
        return " to ".join(map(str, widths)) + (f" at {shares}" if shares else "")


@dataclass(frozen=True)
class Result:
    """What came of it."""

    plan: Plan
    validation: float
    test: float
    parameters: int
    steps: int
    flops: float
    seconds: float


def build(classes: int, width: int) -> Gpt:
    """The small GPT with MLPs of another width."""
    network = Gpt(DEPTH, classes)
    for block in network.blocks:
        block.mlp = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))
    return network


def train(plan: Plan) -> Result:
    """Spend the budget on one network."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    began, corpus = time.perf_counter(), text(CHOOSING_TEXT)
    minibatches = endless(corpus.train, np.random.default_rng(plan.seed))
    width, due, steps, earlier = plan.width, list(plan.times), 0, 0.0
    model = attach(build(corpus.classes, width), width)
    optimizer, spending = make_optimizer(model, plan.rate), esper.Spending(model)
    while (share := (earlier + spending.flops) / BUDGET) < 1:
        if due and share >= due[0]:
            due.pop(0)
            if model.seeds:
                earlier += spending.flops
                model, optimizer = merge(model, optimizer, width, plan.rate)
                spending = esper.Spending(model)
            for slot in model.slots.values():
                slot.germinate(f"units_{width}", alpha=1.0)
                slot.fossilize()
            width *= 2
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * esper.warmup_stable_decay(share)
        model.train()
        learn(model, optimizer, next(minibatches))
        steps += 1
    seconds, flops = time.perf_counter() - began, earlier + spending.flops
    plain = model.finalize()
    assert plain.blocks[0].mlp[0].out_features == width
    validation, test = (measure(plain, part.in_order(256)) for part in (corpus.validation, corpus.test))
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return Result(plan, validation, test, parameters, steps, flops, seconds)


def attach(network: nn.Module, width: int) -> esper.GrowingModel:
    """With as many units on offer in each MLP as it has."""
    return esper.attach(
        network, {r"re:blocks\.\d+\.mlp": [f"units_{width}"]}, torch.zeros(2, WINDOW, dtype=torch.int64)
    )


def make_optimizer(model: esper.GrowingModel, rate: float) -> torch.optim.AdamW:
    """Of the model's groups, to which growth belongs."""
    optimizer = make_adamw(model.parameter_groups(lr=rate), rate)
    model.link(optimizer)
    return optimizer


def merge(
    model: esper.GrowingModel, optimizer: torch.optim.Optimizer, width: int, rate: float
) -> tuple[esper.GrowingModel, torch.optim.AdamW]:
    """The plain wider model, ready to double again, and an optimizer that has the moments of the other one.

    A moment is merged as the weight is that it belongs to; steps are counted as for the host's own layers.
    """
    moments: dict[str, Mapping[str, nn.Parameter]] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, place in zip(model.parameters(), twin.parameters(), strict=True):
                place.copy_(optimizer.state[parameter][key])
        moments[key] = dict(twin.finalize().named_parameters())
    count = max(state["step"] for state in optimizer.state.values())
    wider = attach(model.finalize(), width)
    other = make_optimizer(wider, rate)
    for name, parameter in wider.host.named_parameters():
        merged = {key: values[name].detach().clone() for key, values in moments.items()}
        other.state[parameter] = {"step": count.clone(), **merged}
    return wider, other


class Store(ResultFile[Result]):
    """Results, kept as JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Result)

    def run(self, plans: Sequence[Plan], console: Console) -> None:
        """Those of the trainings that are missing."""

        def run(plan: Plan) -> None:
            self.add(result := train(plan))
            print_line(console, f"{plan}: {result.validation:.4f}, {result.seconds:.0f} s")

        self.run_missing(plans, lambda plan: plan in {result.plan for result in self.results}, run)

    def choose(self) -> list[Plan]:
        """Fixed widths by the seed that chooses, best first, each at its best rate."""
        known = [one for one in self.results if one.plan.seed == CHOOSING and not one.plan.times]
        if not known:
            raise SystemExit("nothing is known of the step choose yet: run that before")
        plans = [one.plan for one in sorted(known, key=lambda one: one.validation)]
        return [next(plan for plan in plans if plan.width == width) for width in dict.fromkeys(p.width for p in plans)]

    def find(self, plan: Plan) -> dict[int, Result]:
        """What is known of a plan by the seeds that chose nothing."""
        return {one.plan.seed: one for one in self.results if one.plan == replace(plan, seed=one.plan.seed) != plan}


def list_finalists(store: Store) -> list[Plan]:
    """The best fixed widths; doubling once, to each of the next two, and throughout, at the rate that is best there."""
    fixed = store.choose()
    rates = {plan.width: plan.rate for plan in fixed}
    grown = [Plan(width, (TIME,), rates[2 * width], CHOOSING) for width in WIDTHS[:2]]
    throughout = Plan(WIDTHS[0], THROUGHOUT, rates[WIDTHS[-1]], CHOOSING)
    return [*sorted(fixed[:FINALISTS], key=lambda plan: plan.width), *grown, throughout]


def main(
    folder: tyro.conf.Positional[Path], step: tyro.conf.Positional[Step], seeds: tuple[int, ...] = FINAL_SEEDS
) -> None:
    """Run a step of the trial, or what is missing of it; `table` prints what is known."""
    store, console = Store(folder / "ffn.jsonl"), Console(width=160)
    if step == "choose":
        store.run([Plan(width, (), rate, CHOOSING) for width in WIDTHS for rate in RATES], console)
    elif step == "final":
        store.run([replace(plan, seed=seed) for seed in seeds for plan in list_finalists(store)], console)
    for one in sorted((one for one in store.results if one.plan.seed == CHOOSING), key=lambda one: one.validation):
        print_line(console, f"{one.plan.name}, rate {one.plan.rate:g}: validation {one.validation:.4f}")
    for line in tabulate(store):
        print_line(console, line)


def tabulate(store: Store) -> list[str]:
    """Lines of a Markdown table: means ± deviations over seeds, and paired differences ± standard errors."""
    plans = [plan for plan in list_finalists(store) if store.find(plan)]
    fixed = [plan for plan in plans if not plan.times]
    if not fixed:
        return []
    best = min(fixed, key=lambda plan: np.mean([one.validation for one in store.find(plan).values()]))
    lines = [
        f"| hidden units | rate | test loss | beside {best.name} fixed | parameters at last | steps |",
        "|---|---|---|---|---|---|",
    ]
    for plan in plans:
        found, other = store.find(plan), store.find(best)
        less = [found[seed].test - other[seed].test for seed in found if seed in other]
        beside = f"{np.mean(less):+.3f} ± {np.std(less, ddof=1) / math.sqrt(len(less)):.3f}" if plan != best else ""
        tests = [one.test for one in found.values()]
        first = next(iter(found.values()))
        lines.append(
            f"| {plan.name} | {plan.rate:g} | {np.mean(tests):.3f} ± {np.std(tests, ddof=1):.3f} | {beside} "
            f"| {first.parameters:,} | {first.steps:,} |"
        )
    return lines


if __name__ == "__main__":
    tyro.cli(main)
