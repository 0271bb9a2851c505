"""Results of growth in width as lines of Markdown tables: what `gromo_mlp.py` and `width_search.py` print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from width_mlp import (
    BARE,
    BOTH,
    GROMO_SHAPE,
    GROWTHS,
    LAYERS,
    OFFERS,
    TASKS,
    WIDTH_SLOTS,
    Arm,
    Result,
    list_arms,
    list_parts,
)

from esper.control.rules import LookSettings

MULTIPLES = (1, 4, 16)
"""FLOPs of a search, in those of one training that grows."""


@dataclass(frozen=True)
class Score:
    """What is said of a hidden layer of a bare host."""

    task: str
    seed: int
    epoch: int
    layer: int
    gromo: float
    """Expected fall of the loss per unit of step, by the best update of the layer that follows and 8 new neurons."""
    gromo_neurons: float
    """The same by the neurons alone."""
    gromo_parameters: int
    units: float
    """Promise of `units_8`, held out."""
    units_fitted: float
    units_parameters: int
    module: str
    """What promises most behind the layer, held out."""
    modules: float
    modules_fitted: float
    module_parameters: int


@dataclass(frozen=True)
class Trial:
    """One network of a search."""

    widths: tuple[int, ...]
    modules: tuple[str, ...]
    """By layer; ``""`` is none."""
    validation: float
    accuracy: float
    parameters: int
    spent: float
    """FLOPs of the search up to here, in those of the training that grows."""


@dataclass(frozen=True)
class Search:
    """A search within the final size of the training that grows."""

    task: str
    seed: int
    trials: tuple[Trial, ...]
    proposed: int
    """Networks that were proposed, those that are too large included."""


def tabulate_arms(results: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table, the tasks beside each other; without what was not done with all random seeds."""
    tasks = [task for task in TASKS if select(results, Arm(task, BARE, 0))]
    columns = [f"{task} | parameters | FLOPs" for task in tasks]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + 3 * len(tasks)) + "|"]
    for arm in (*list_arms("", 0), *list_parts("", 0)):
        cells: list[str] = []
        for task in tasks:
            own = select(results, Arm(task, arm.how, 0, arm.like, arm.equal_flops))
            if len(own) == len(select(results, Arm(task, BARE, 0))):
                right = [100 * one.accuracy for one in own]
                size, flops = (np.mean([getattr(one, name) for one in own]) for name in ("parameters", "flops"))
                cells += [f"{np.mean(right):.1f} ± {deviate(right):.1f}", f"{size:,.0f}", f"{flops / 1e6:,.0f} M"]
            else:
                cells += ["", "", ""]
        if any(cells):
            lines.append(f"| {describe(arm)} | {' | '.join(cells)} |")
    return lines


def describe(arm: Arm) -> str:
    """What it is in a table."""
    size = f", size of {arm.like!r}" if arm.like and arm.how not in (BARE, GROMO_SHAPE) else ""
    flops = f", FLOPs of {arm.like!r}" if arm.equal_flops else ""
    return arm.how + size + flops


def select(results: Sequence[Result], arm: Arm) -> list[Result]:
    """All seeds of a way to train."""
    key = (arm.task, arm.how, arm.like, arm.equal_flops)
    return [one for one in results if (one.arm.task, one.arm.how, one.arm.like, one.arm.equal_flops) == key]


def deviate(values: Sequence[float]) -> float:
    """Standard deviation; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def tabulate_kinds(results: Sequence[Result]) -> list[str]:
    """What was kept, in the mean over seeds, and what was most promising when the rule first looked."""
    lines = ["| | task | width kept | modules kept | kept, by seed |", "|---|---|---|---|---|"]
    for how in OFFERS:
        for task in TASKS:
            own = select(results, Arm(task, how, 0))
            if own:
                counts = [sum(slot in WIDTH_SLOTS for slot, _ in one.grown) for one in own]
                modules = [len(one.grown) - widths for one, widths in zip(own, counts, strict=True)]
                kept = "; ".join(" ".join(f"{name}@{slot}" for slot, name in one.grown) or "-" for one in own)
                lines.append(f"| {how} | {task} | {np.mean(counts):.1f} | {np.mean(modules):.1f} | {kept} |")
    return lines


def tabulate_looks(results: Sequence[Result]) -> list[str]:
    """What was promised at each look of the rule with both kinds on offer: the best of each, in the mean over seeds."""
    lines = [
        "| task | look | kind | fitted | held out | parameters | held out per 1,000 parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        own = select(results, Arm(task, BOTH, 0))
        for look in range(max((len(one.looks) for one in own), default=0)):
            for kind in ("width", "modules"):
                found = [best for one in own if len(one.looks) > look and (best := find_best(one.looks[look], kind))]
                if found:
                    fitted, held_out, size = np.mean(found, 0)
                    per = np.mean([1000 * held / parameters for _, held, parameters in found])
                    lines.append(
                        f"| {task} | {look + 1} | {kind} | {fitted:.2f} | {held_out:.2f} | {size:,.0f} | {per:.2f} |"
                    )
    return lines


def find_best(look: dict[str, Any], kind: str) -> list[float] | None:
    """Fitted and held-out promise and parameters of what promises most of a kind."""
    rows = [row for name, row in look.items() if (name.partition(" ")[0] in WIDTH_SLOTS) == (kind == "width")]
    return max(
        rows, key=lambda row: LookSettings().fitted * row[0] + (1 - LookSettings().fitted) * row[1], default=None
    )


def tabulate_scores(scores: Sequence[Score]) -> list[str]:
    """Means over seeds by task, epoch and layer, and rank correlations over layers."""
    lines = [
        "| task | epochs | layer | gromo, 8 neurons | neurons alone | per 1,000 parameters | `units_8` held out "
        "| per 1,000 | best module held out | per 1,000 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for epoch in GROWTHS:
            for layer in range(1, LAYERS + 1):
                own = [one for one in scores if (one.task, one.epoch, one.layer) == (task, epoch, layer)]
                if own:
                    means = [
                        f"{np.mean(values):.3f}"
                        for values in (
                            [one.gromo for one in own],
                            [one.gromo_neurons for one in own],
                            [1000 * one.gromo_neurons / one.gromo_parameters for one in own],
                            [one.units for one in own],
                            [1000 * one.units / one.units_parameters for one in own],
                            [one.modules for one in own],
                            [1000 * one.modules / one.module_parameters for one in own],
                        )
                    ]
                    lines.append(f"| {task} | {epoch} | {layer} | {' | '.join(means)} |")
    return lines


def correlate(scores: Sequence[Score]) -> list[str]:
    """Rank correlation over layers of gromo's scores with promises, mean ± deviation over seeds."""
    lines: list[str] = []
    pairs = {
        "gromo with units_8": ("gromo", "units"),
        "gromo's neurons with units_8": ("gromo_neurons", "units"),
        "gromo with the best module": ("gromo", "modules"),
    }
    for task in TASKS:
        for epoch in GROWTHS:
            own = [one for one in scores if (one.task, one.epoch) == (task, epoch)]
            seeds = sorted({one.seed for one in own})
            for title, names in pairs.items():
                found: list[float] = []
                for seed in seeds:
                    layers = [one for one in own if one.seed == seed]
                    found.append(
                        float(spearmanr(*([getattr(one, name) for one in layers] for name in names)).statistic)
                    )
                if found:
                    lines.append(f"{task}, epoch {epoch}, {title}: {np.mean(found):+.2f} ± {deviate(found):.2f}")
    return lines


def tabulate_search(searches: Sequence[Search], results: Sequence[Result]) -> list[str]:
    """The best of a search on validation data within each multiple, beside the training that grows."""
    lines = [
        "| | test accuracy | less growing, paired | trials | parameters |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS:
        own = [one for one in searches if one.task == task]
        if not own:
            continue
        grown = {one.arm.seed: one for one in select(results, Arm(task, BOTH, 0))}
        right = [100 * grown[one.seed].accuracy for one in own]
        size = np.mean([grown[one.seed].parameters for one in own])
        lines.append(f"| {task}: {BOTH} | {np.mean(right):.1f} ± {deviate(right):.1f} | | 1 | {size:,.0f} |")
        for multiple in MULTIPLES:
            picked = [pick(one, multiple) for one in own]
            right = [100 * best.accuracy for best, _ in picked]
            less = [
                100 * (best.accuracy - grown[one.seed].accuracy) for (best, _), one in zip(picked, own, strict=True)
            ]
            error = deviate(less) / math.sqrt(len(less))
            trials, size = np.mean([made for _, made in picked]), np.mean([best.parameters for best, _ in picked])
            lines.append(
                f"| {task}: search, {multiple} times the FLOPs | {np.mean(right):.1f} ± {deviate(right):.1f} "
                f"| {np.mean(less):+.1f} ± {error:.1f} | {trials:.0f} | {size:,.0f} |"
            )
    return lines


def pick(search: Search, multiple: float) -> tuple[Trial, int]:
    """The best trial on validation data within so many FLOPs, and how many there were, at least one."""
    within = [one for one in search.trials if one.spent <= multiple] or [search.trials[0]]
    return max(within, key=lambda one: one.validation), len(within)


def describe_result(result: Result) -> str:
    """One line."""
    return (
        f"{result.arm.task}, {describe(result.arm)}, seed {result.arm.seed}: {result.accuracy:.3f}, "
        f"{result.parameters} parameters, {result.flops / 1e6:.0f} MFLOPs, {result.epochs} epochs, {result.seconds} s"
    )
