"""How much is there to learn beyond the look-ahead rule? Networks that branch off from it at one decision.

    python benchmarks/branches.py FOLDER --workers 2      # 40 minutes on one core

Networks of generated suites are played by the rule. Copies of each are played by the rule too, except at one decision,
where a copy takes another legal choice. A copy has the same first weights and the same data as its original, so the
difference of their test scores is what this one choice was worth: an advantage that is measured and not estimated.
Regressions then predict that worth from what a controller observes of the choice, on suites that were left out of their
fit. Where they cannot, one step of policy improvement from these observations showed nothing at this size.
Errors are over suites, since all copies of a network share the score of its original. Finished suites are kept in
FOLDER; stopped, the same command goes on.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from esper.control.controller import Actions
from esper.control.rules import ActionBuilder, LookRule, LookSettings
from esper.dash.output import print_line
from esper.engine.observation import Observation
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.rules import ActionMasks, Rules
from esper.numerics.arrays import Bools, Floats, Ints
from esper.tasks.registry import GENERATED, get_suite
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from esper.train.workers import LocalWorkers

FIRST_SUITE = 9200
"""Number of the first generated suite; no table that reports a rule has these."""
RENTS = (0.0, None)
"""None: the rents of the suite."""
LATEST = 0.75
"""Share of the episode in which copies branch off."""
BEST = 0.05
"""Share of the choices, those of the largest prediction, of which the table has the worth."""
FOLDS = 8
FEWEST = 20
"""Branches of a kind from which on the table has it."""
OPS = (Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE, Op.PRUNE)
"""Operations in which a choice may differ from the rule's; how seeds blend in is not varied."""
REGRESSIONS: dict[str, Any] = {
    "ridge": make_pipeline(StandardScaler(), Ridge(1e4)),
    "boosted trees": HistGradientBoostingRegressor(
        max_iter=40, learning_rate=0.05, max_leaf_nodes=8, min_samples_leaf=100, max_features=0.3, random_state=0
    ),
    "random forest": RandomForestRegressor(100, min_samples_leaf=50, max_features=0.2, random_state=0),
}
"""What learns the worth of a choice."""


def main(
    folder: tyro.conf.Positional[Path],
    suites: int = 32,
    instances: int = 4,
    copies: int = 15,
    workers: int = 1,
) -> None:
    """Play the branches that are not there yet, and print what they were worth and whether that can be predicted.

    Args:
        folder: Keeps the branches.
        suites: Generated suites.
        instances: Networks of each suite and rent that are branched off from.
        copies: Branches of each.
        workers: Processes.
    """
    console = Console(width=120)
    folder.mkdir(parents=True, exist_ok=True)
    rule = hashlib.sha256(LookSettings().model_dump_json().encode()).hexdigest()[:8]
    tasks = {
        folder / f"{number}-{'own' if rent is None else 'free'}-{instances}x{copies}-{rule}.npz": Collection(
            f"{GENERATED}:{number}", rent, instances, copies
        )
        for number, rent in itertools.product(range(FIRST_SUITE, FIRST_SUITE + suites), RENTS)
    }
    missing = [file for file in tasks if not file.exists()]
    print_line(console, f"{len(tasks)} cohorts, {len(tasks) - len(missing)} of them there already")
    with LocalWorkers(workers) as pool:
        played = pool.as_completed(collect_branches, [tasks[file] for file in missing])
        for done, (index, branches) in enumerate(played, start=1):
            partial = missing[index].with_suffix(".part")
            with partial.open("wb") as out:
                np.savez_compressed(out, **branches)
            partial.replace(missing[index])
            mean = float(np.mean(branches["worth"]))
            print_line(console, f"{done} of {len(missing)}: {missing[index].stem}, mean worth {mean:+.4f}")
    branches = [dict(np.load(file)) for file in tasks]
    console.print(tabulate_choices(branches))
    console.print(tabulate_regressions(branches))


class Choices(NamedTuple):
    """N legal choices of E networks."""

    row: Ints
    """The network, ``[N]``."""
    op: Ints
    slot: Ints
    blueprint: Ints


def list_choices(masks: ActionMasks) -> Choices:
    """All legal choices of operation, slot and blueprint, sorted by network."""
    parts: list[Ints] = []
    for op in OPS:
        if op is Op.GERMINATE:
            row, slot, blueprint = np.nonzero(masks.blueprint & masks.slot[:, op, :, None])
        else:
            row, slot = np.nonzero(masks.slot[:, op])
            blueprint = np.zeros_like(row)
        parts.append(np.stack([row, np.full_like(row, op), slot, blueprint]))
    columns = np.concatenate(parts, axis=1)
    return Choices(*columns[:, np.argsort(columns[0], kind="stable")])


def describe_choices(observation: Observation, choices: Choices, advised: Actions) -> Floats:
    """What is observed of each choice and of the rule's choice beside it, ``[N, D]``."""
    globals_, slots, blueprints = (part.numpy() for part in observation)
    row, rule = choices.row, advised[choices.row]
    # The rule's own slot and blueprint count only where its operation reads them.
    germinates, rule_germinates = choices.op == Op.GERMINATE, rule[:, Head.OP] == Op.GERMINATE
    acts, rule_acts = choices.op != Op.WAIT, rule[:, Head.OP] != Op.WAIT
    return np.concatenate(
        [
            globals_[row],
            slots[row].mean(1),
            np.eye(len(Op))[choices.op],
            np.eye(len(Op))[rule[:, Head.OP]],
            slots[row, choices.slot] * acts[:, None],
            slots[row, rule[:, Head.SLOT]] * rule_acts[:, None],
            blueprints[row, choices.slot, choices.blueprint] * germinates[:, None],
            blueprints[row, rule[:, Head.SLOT], rule[:, Head.BLUEPRINT]] * rule_germinates[:, None],
        ],
        axis=1,
    )


def take_choices(choices: Choices, masks: ActionMasks, actions: Actions) -> Actions:
    """``actions`` with at most one choice per network in place of its action."""
    decisions, actions = ActionBuilder(masks), actions.copy()
    slots = np.zeros(masks.slot.shape[::2], np.bool_)
    for op in (Op.ADVANCE, Op.FOSSILIZE, Op.PRUNE):
        chosen = choices.op == op
        due = slots.copy()
        due[choices.row[chosen], choices.slot[chosen]] = True
        decisions.act_on(op, due)
    chosen = choices.op == Op.GERMINATE
    slot, blueprint, due = (np.zeros(masks.environments, kind) for kind in (np.int64, np.int64, np.bool_))
    rows = choices.row[chosen]
    slot[rows], blueprint[rows], due[rows] = choices.slot[chosen], choices.blueprint[chosen], True
    decisions.germinate(slot, blueprint, due)
    actions[choices.row] = decisions.actions[choices.row]
    return actions


def find_same(choices: Choices, actions: Actions) -> Bools:
    """Which of the choices are those of the networks' actions, ``[N]``."""
    mine = actions[choices.row]
    same = choices.op == mine[:, Head.OP]
    same &= (choices.op == Op.WAIT) | (choices.slot == mine[:, Head.SLOT])
    return same & ((choices.op != Op.GERMINATE) | (choices.blueprint == mine[:, Head.BLUEPRINT]))


class Branching:
    """The rule's decisions, but for one of each copy, which is drawn from the other legal choices.

    An operation is drawn first, of those that are legal; then a slot and a blueprint for it.

    Args:
        rule: Decides otherwise.
        at: The decision at which each network branches off, or the next one that has another choice; -1: never.
    """

    def __init__(self, rule: LookRule, at: Ints, seed: int) -> None:
        self._rule, self._at, self.name, self.promise = rule, at, "branches", rule.promise
        self._generators = [np.random.default_rng((seed, row)) for row in range(len(at))]
        self.described: dict[int, Floats] = {}
        """What was observed of the choice of each network that branched off, ``[D]``."""
        self.ops: dict[int, tuple[int, int]] = {}
        """The operation that was chosen, and the rule's."""

    def start(self, seeds: Sequence[int]) -> int:
        """Decisions taken."""
        return 0

    def act(self, observation: Observation, masks: ActionMasks, state: int) -> tuple[Actions, int]:
        """One decision per network."""
        actions, _ = self._rule.act(observation, masks, None)
        choices = list_choices(masks)
        other = ~find_same(choices, actions)
        picked: list[int] = []
        for row in np.flatnonzero((self._at >= 0) & (self._at <= state)):
            if row in self.described:
                continue
            open_to_it = np.flatnonzero(other & (choices.row == row))
            if len(open_to_it):
                rng = self._generators[row]
                op = rng.choice(np.unique(choices.op[open_to_it]))
                picked.append(int(rng.choice(open_to_it[choices.op[open_to_it] == op])))
        taken = Choices(*(column[picked] for column in choices))
        for row, op, described in zip(
            taken.row.tolist(), taken.op.tolist(), describe_choices(observation, taken, actions), strict=True
        ):
            self.described[row], self.ops[row] = described, (op, int(actions[row, Head.OP]))
        return take_choices(taken, masks, actions), state + 1


@dataclass(frozen=True)
class Collection:
    """Branches of some networks of one suite; any process may play them."""

    suite: str
    rent: float | None
    instances: int
    copies: int


def collect_branches(task: Collection) -> dict[str, Any]:
    """What each branch that differs observed, the operations, and what it was worth."""
    suite = get_suite(task.suite)
    drawn = suite.sample(task.instances, "train", np.random.default_rng(0))
    if task.rent is not None:
        drawn = [replace(instance, rent=task.rent) for instance in drawn]
    instances = [instance for instance in drawn for _ in range(task.copies + 1)]

    # The first network of each instance is the original; its copies branch off at random decisions.
    rng = np.random.default_rng(suite.steps)
    at = rng.integers(1, int(LATEST * suite.steps) + 1, size=len(instances))
    at[:: task.copies + 1] = -1
    controller = Branching(LookRule(LookSettings(), suite.steps), at, seed=int(suite.name.split(":")[1]))
    config = EvaluationConfig(suite.name, Rules()).for_controller(controller)
    (played,) = evaluate_cohort(CohortTask(config, [CohortPart(controller, instances)]))
    scores = np.array([record.score for record in played.records]).reshape(task.instances, -1)
    rows = sorted(controller.described)
    return {
        "described": np.array([controller.described[row] for row in rows], np.float32),
        "ops": np.array([controller.ops[row] for row in rows]),
        "worth": (scores - scores[:, :1]).reshape(-1)[rows],
    }


def tabulate_choices(branches: Sequence[dict[str, Any]]) -> Table:
    """What choices were worth by the operation of the rule and the one taken in its place."""
    table = Table("rule", "taken", "branches", "worth", "spread", title="What one other choice is worth", box=None)
    ops, worth = (np.concatenate([one[key] for one in branches]) for key in ("ops", "worth"))
    suite = number_suites(branches)
    for rule, taken in itertools.product(OPS, OPS):
        rows = (ops[:, 0] == taken) & (ops[:, 1] == rule)
        if rows.sum() >= FEWEST:
            cell = f"{worth[rows].mean():+.4f} ± {compute_error(worth[rows], suite[rows]):.4f}"
            table.add_row(
                rule.name.lower(), taken.name.lower(), f"{rows.sum()}", cell, f"{worth[rows].std(ddof=1):.3f}"
            )
    return table


def number_suites(branches: Sequence[dict[str, Any]]) -> Ints:
    """The suite of each choice, ``[N]``: cohorts of one suite at several rents follow each other."""
    return np.concatenate([np.full(len(one["worth"]), index // len(RENTS)) for index, one in enumerate(branches)])


def compute_error(values: Floats, clusters: Ints) -> float:
    """Standard error of the mean of values that depend on each other within clusters (Liang and Zeger, 1986)."""
    sums = np.bincount(clusters, values - values.mean())
    return float(np.sqrt(np.square(sums).sum()) / len(values))


def tabulate_regressions(branches: Sequence[dict[str, Any]]) -> Table:
    """How well regressions predict what a choice is worth, on suites that were left out of their fit."""
    described, worth = (np.concatenate([one[key] for one in branches]) for key in ("described", "worth"))
    suite = number_suites(branches)
    columns = ("regression", "R2", "rank correlation", f"worth of the best {BEST:.0%}")
    table = Table(*columns, title=f"{len(worth)} choices, predicted on suites left out", box=None)
    folds = GroupKFold(min(FOLDS, len(np.unique(suite))))
    for name, regression in REGRESSIONS.items():
        predicted = cross_val_predict(regression, described, worth, cv=folds, groups=suite)
        best = predicted > np.quantile(predicted, 1 - BEST)
        explained = 1 - np.square(worth - predicted).mean() / worth.var()
        cell = f"{worth[best].mean():+.4f} ± {compute_error(worth[best], suite[best]):.4f}"
        correlation = spearmanr(predicted, worth).statistic
        table.add_row(name, f"{explained:+.3f}", f"{correlation:+.3f}", cell)
    return table


if __name__ == "__main__":
    tyro.cli(main)
