"""How much is there to learn beyond the look-ahead rule? Networks that branch off from it at one decision.

    python benchmarks/branches.py FOLDER --workers 2

Networks of generated suites are played by the rule. Copies of each are played by the rule too, except at one decision,
where a copy takes another legal choice. A copy has the same first weights and the same data as its original, so the
difference of their test scores is what this one choice was worth. Then a regression learns that worth from what a
controller observes at the decision, and a controller takes the choice of the largest predicted worth if it is above a
margin. That is one step of policy improvement with measured advantages; with ``--rounds 2`` the next copies branch off
from that controller (expert iteration, Anthony et al., 2017, arXiv:1705.08439). The margin is chosen on suites of its
own, and the result is reported on others. Finished suites are kept in FOLDER; stopped, the same command goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingRegressor

from esper.control.controller import Actions
from esper.control.rules import ActionBuilder, LookRule, LookSettings
from esper.dash.output import print_line
from esper.engine.observation import Observation
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Bools, Floats, Ints
from esper.tasks.registry import GENERATED, get_suite
from esper.tasks.suite_files import allow_files
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from esper.train.workers import LocalWorkers

HERE = Path(__file__).parent
LEARNING, CHOOSING, REPORTING = range(9200, 9260), range(9100, 9112), range(3_000_000, 3_000_040)
"""Numbers of generated suites; those that report are the ones that `carry_over.py` reports the rule on."""
UNSEEN = tuple(
    f"{HERE / file}:{name}"
    for file, name in (
        ("unseen_suites.py", "compass"),
        ("unseen_suites.py", "recurrent"),
        ("strange_suites.py", "relations"),
        ("strange_suites.py", "orbits"),
    )
)
"""Suites that report beside the generated ones."""
RENTS = (0.0, None)
"""None: the rents of the suite."""
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.04)
"""Predicted worth from which a choice is preferred to the rule's."""
LATEST = 0.75
"""Share of the episode in which copies branch off."""
OPS = (Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE, Op.PRUNE)
"""Operations in which a choice may differ from the rule's; how seeds blend in is not varied."""


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


class Improved:
    """The rule, improved by a regression: it takes the choice of the largest predicted worth if that is large enough."""

    def __init__(self, horizon: int, models: Sequence[Any] = (), margin: float = 0.0) -> None:
        self._rule, self._models, self._margin = LookRule(LookSettings(), horizon), models, margin
        self.name = f"margin {margin:g}" if models else LookRule.name
        self.promise = self._rule.promise

    def start(self, seeds: Sequence[int]) -> None:
        """It has no state."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        actions, _ = self._rule.act(observation, masks, None)
        if not self._models:
            return actions, None
        choices = list_choices(masks)
        described = describe_choices(observation, choices, actions)
        worth = np.mean([model.predict(described) for model in self._models], axis=0)
        worth = np.where(find_same(choices, actions), 0.0, worth)
        # The best choice of each network; its own if nothing is worth the margin.
        order = np.lexsort((-worth, choices.row))
        first = order[np.unique(choices.row[order], return_index=True)[1]]
        better = first[worth[first] > self._margin]
        return take_choices(Choices(*(column[better] for column in choices)), masks, actions), None


def find_same(choices: Choices, actions: Actions) -> Bools:
    """Which of the choices are those of the networks' actions, ``[N]``."""
    mine = actions[choices.row]
    same = choices.op == mine[:, Head.OP]
    same &= (choices.op == Op.WAIT) | (choices.slot == mine[:, Head.SLOT])
    return same & ((choices.op != Op.GERMINATE) | (choices.blueprint == mine[:, Head.BLUEPRINT]))


class Branching:
    """A controller's decisions, but for one of each copy, which is drawn from the other legal choices.

    An operation is drawn first, of those that are legal; then a slot and a blueprint for it.

    Args:
        base: Decides otherwise.
        at: The decision at which each network branches off, or the next one that has another choice; -1: never.
    """

    def __init__(self, base: Improved, at: Ints, seed: int) -> None:
        self._base, self._at, self.name, self.promise = base, at, "branches", base.promise
        self._generators = [np.random.default_rng((seed, row)) for row in range(len(at))]
        self.described: dict[int, Floats] = {}
        """What was observed of the choice of each network that branched off, ``[D]``."""
        self.ops: dict[int, tuple[int, int]] = {}
        """The operation that was chosen, and that of the base."""

    def start(self, seeds: Sequence[int]) -> int:
        """Decisions taken."""
        return 0

    def act(self, observation: Observation, masks: ActionMasks, state: int) -> tuple[Actions, int]:
        """One decision per network."""
        actions, _ = self._base.act(observation, masks, None)
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
    models: tuple[Any, ...]
    margin: float


def sample_instances(suite: str, rent: float | None, count: int) -> list[Any]:
    """Instances of a suite, the same each time, at its rents or at one."""
    drawn = get_suite(suite).sample(count, "train", np.random.default_rng(0))
    return drawn if rent is None else [replace(instance, rent=rent) for instance in drawn]


def collect_branches(task: Collection) -> dict[str, Any]:
    """What each branch that differs observed, the operations, and what it was worth."""
    suite = get_suite(task.suite)
    instances = [one for one in sample_instances(task.suite, task.rent, task.instances) for _ in range(task.copies + 1)]
    rng = np.random.default_rng(suite.steps)
    at = rng.integers(1, int(LATEST * suite.steps) + 1, size=len(instances))
    at[:: task.copies + 1] = -1
    controller = Branching(Improved(suite.steps, task.models, task.margin), at, seed=int(suite.name.split(":")[1]))
    config = EvaluationConfig(suite.name, Rules()).for_controller(controller)
    (played,) = evaluate_cohort(CohortTask(config, [CohortPart(controller, instances)]))
    scores = np.array([record.score for record in played.records]).reshape(task.instances, -1)
    worth = (scores - scores[:, :1]).reshape(-1)
    rows = sorted(controller.described)
    return {
        "described": np.array([controller.described[row] for row in rows], np.float32),
        "ops": np.array([controller.ops[row] for row in rows]),
        "worth": worth[rows],
        "network": np.array(rows) // (task.copies + 1),
        "when": at[rows] / suite.steps,
    }


@dataclass(frozen=True)
class Game:
    """The rule and improved controllers on instances of one suite; any process may play it."""

    suite: str
    rent: float | None
    instances: int
    models: tuple[Any, ...]
    margins: tuple[float, ...]


def play(game: Game) -> Floats:
    """Test scores of the rule and of the improved controllers, ``[1 + margins, instances]``."""
    horizon = get_suite(game.suite).steps
    controllers = [Improved(horizon), *(Improved(horizon, game.models, margin) for margin in game.margins)]
    instances = sample_instances(game.suite, game.rent, game.instances)
    config = EvaluationConfig(game.suite, Rules()).for_controller(controllers[0])
    played = evaluate_cohort(CohortTask(config, [CohortPart(one, instances) for one in controllers]))
    return np.array([[record.score for record in result.records] for result in played])


def main(
    folder: tyro.conf.Positional[Path],
    suites: int = len(LEARNING),
    instances: int = 4,
    copies: int = 15,
    rounds: int = 1,
    workers: int = 1,
) -> None:
    """Play the branches that are not there yet, fit, choose a margin, and report.

    Args:
        folder: Keeps the branches.
        suites: Generated suites to learn on.
        instances: Networks of each suite and rent that are branched off from.
        copies: Branches of each.
        rounds: Steps of policy improvement.
        workers: Processes.
    """
    console = Console(width=120)
    allow_files([part for name in UNSEEN for part in ("--suite", name)])
    models: tuple[Any, ...] = ()
    margin = 0.0
    with LocalWorkers(workers) as pool:
        for number in range(rounds):
            # Play the branches of this round.
            place = folder / f"round{number}"
            place.mkdir(parents=True, exist_ok=True)
            names = [f"{GENERATED}:{suite}" for suite in LEARNING[:suites]]
            files = {
                place / f"{name.split(':')[1]}-{'own' if rent is None else 'free'}-{instances}x{copies}.npz": Collection(
                    name, rent, instances, copies, models, margin
                )
                for name, rent in itertools.product(names, RENTS)
            }
            missing = [file for file in files if not file.exists()]
            for done, (index, branches) in enumerate(
                pool.as_completed(collect_branches, [files[file] for file in missing]), start=1
            ):
                partial = missing[index].with_suffix(".part")
                with partial.open("wb") as out:
                    np.savez_compressed(out, **branches)
                partial.replace(missing[index])
                mean = float(np.mean(branches["worth"]))
                print_line(console, f"round {number}, {done} of {len(missing)}: {missing[index].stem}, {mean:+.4f}")
            branches = [dict(np.load(file)) for file in files]
            console.print(tabulate_branches(branches))

            # Learn what a choice is worth, choose the margin on suites of their own, and report on others.
            described, worth = (np.concatenate([one[key] for one in branches]) for key in ("described", "worth"))
            group = np.concatenate([np.full(len(one["worth"]), index // 2) for index, one in enumerate(branches)])
            console.print(f"R2 on suites that were left out of the fit: {compute_left_out_r2(described, worth, group):+.3f}")
            models = fit_models(described, worth)
            chosen = report(console, pool, models, MARGINS, "choosing", CHOOSING, ())
            margin = MARGINS[int(chosen.argmax())]
            report(console, pool, models, (margin,), "reporting", REPORTING, UNSEEN)


def fit_models(described: Floats, worth: Floats) -> tuple[Any, ...]:
    """Boosted trees on branches ``[N, D]`` and their worth ``[N]``, from five random seeds."""
    return tuple(
        HistGradientBoostingRegressor(
            max_iter=150, learning_rate=0.05, max_leaf_nodes=15, min_samples_leaf=60, l2_regularization=10.0,
            max_features=0.3, random_state=seed,
        ).fit(described, worth)
        for seed in range(5)
    )  # fmt: skip


def compute_left_out_r2(described: Floats, worth: Floats, group: Ints, folds: int = 5) -> float:
    """Explained share of the variance of the worth, on groups that were left out of the fit."""
    error = np.zeros_like(worth)
    for fold in range(folds):
        out = group % folds == fold
        if out.all() or not out.any():
            return float("nan")
        models = fit_models(described[~out], worth[~out])
        error[out] = worth[out] - np.mean([model.predict(described[out]) for model in models], axis=0)
    return float(1 - np.square(error).mean() / worth.var())


def tabulate_branches(branches: Sequence[dict[str, Any]]) -> Table:
    """What choices were worth by the operation of the rule and the one taken in its place."""
    table = Table("rule", "taken", "when", "branches", "worth", "spread", title="What one other choice is worth", box=None)
    ops, worth, when = (np.concatenate([one[key] for one in branches]) for key in ("ops", "worth", "when"))
    for rule, taken in itertools.product(OPS, OPS):
        for title, part in (("first quarter", when <= 0.25), ("later", when > 0.25)):
            rows = (ops[:, 0] == taken) & (ops[:, 1] == rule) & part
            if rows.sum() >= 20:
                mean, spread = worth[rows].mean(), worth[rows].std(ddof=1)
                cell = f"{mean:+.4f} ± {spread / np.sqrt(rows.sum()):.4f}"
                table.add_row(rule.name.lower(), taken.name.lower(), title, f"{rows.sum()}", cell, f"{spread:.3f}")
    return table


def report(
    console: Console,
    pool: LocalWorkers,
    models: tuple[Any, ...],
    margins: tuple[float, ...],
    title: str,
    numbers: Sequence[int],
    others: Sequence[str],
) -> Floats:
    """Print the scores less the rule's on generated suites together and on others; the mean by margin is returned."""
    games = [Game(f"{GENERATED}:{number}", rent, 8, models, margins) for number in numbers for rent in RENTS]
    games += [Game(suite, rent, 48, models, margins) for suite in others for rent in RENTS]
    scores: list[Floats] = [np.zeros(0)] * len(games)
    for done, (index, result) in enumerate(pool.as_completed(play, games), start=1):
        scores[index] = result
        if done % 5 == 0:
            print_line(console, f"{title}: {done} of {len(games)} games")
    table = Table("suites", "rent", "margin", "rule", "less the rule", title=title, box=None)
    gains = [score[1:] - score[:1] for score in scores]
    generated = len(numbers) * len(RENTS)
    for position, rent in enumerate(RENTS):
        name, mine = "own" if rent is None else "0", range(position, generated, len(RENTS))
        for column, margin in enumerate(margins):
            means = np.array([gains[index][column].mean() for index in mine])
            cell = f"{means.mean():+.4f} ± {means.std(ddof=1) / np.sqrt(len(means)):.4f}"
            level = np.mean([scores[index][0].mean() for index in mine])
            table.add_row(f"{len(mine)} generated", name, f"{margin:g}", f"{level:.3f}", cell)
    for index in range(generated, len(games)):
        name = "own" if games[index].rent is None else "0"
        for column, margin in enumerate(margins):
            gain = gains[index][column]
            cell = f"{gain.mean():+.4f} ± {gain.std(ddof=1) / np.sqrt(len(gain)):.4f}"
            suite = games[index].suite.rpartition(":")[2]
            table.add_row(suite, name, f"{margin:g}", f"{scores[index][0].mean():.3f}", cell)
    console.print(table)
    return np.mean([gain.mean(1) for gain in gains[:generated]], axis=0)


if __name__ == "__main__":
    tyro.cli(main)
