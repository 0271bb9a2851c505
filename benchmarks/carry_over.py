"""Does a controller carry over? Rules and policies on suites that nothing was trained or tuned for.

    python benchmarks/carry_over.py [--suites recurrent rings/transfer ...] [--generated 2000000 40]
        [--objective loss] [--rent 0] [--arms look none ...] [--controllers benchmarks/former_rule.py:FormerLook]
        [--runs RUN ...]

Suites are named as in `esper evaluate`, ``NAME/transfer`` for families of a suite that no controller trains on;
``--generated FIRST COUNT`` adds generated ones, which are reported together. All controllers play the same instances,
at the rents of the suites or at the one that is given; 0 is what a `Grower` charges unless it is given another.
What others score less than the rule that looks is a mean, over instances of a suite or over generated suites, ± its
standard error.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from esper.config.loading import load_settings
from esper.control.controller import Controller, is_in_file, load_controller
from esper.control.learned import PolicyOrigin, restore_controller
from esper.control.rules import LookRule
from esper.errors import ConfigError
from esper.lab.evaluate import sample_for_evaluation
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import GENERATED, get_suite
from esper.tasks.suite import Objective, Split, Suite
from esper.tasks.suite_files import allow_files
from esper.train.evaluation import EvaluationConfig, create_baselines, evaluate_controllers
from esper.train.workers import LocalWorkers

HERE = Path(__file__).parent
FILES = {
    "recurrent": HERE / "unseen_suites.py",
    "compass": HERE / "unseen_suites.py",
    "rings": HERE.parent / "examples" / "own_suite.py",
    "relations": HERE / "strange_suites.py",
    "orbits": HERE / "strange_suites.py",
}
"""Where suites are that are not Esper's own."""
UNSEEN = ("recurrent", "compass", "rings", "rings/transfer", "tokens/transfer")
WORKERS = 2


@dataclass(frozen=True)
class Game:
    """A suite's split, which is played by all controllers; any process may compute it."""

    suite: str
    split: Split
    instances: int
    seed: int
    rent: float | None
    """None: the rents of the suite."""
    arms: tuple[str, ...]
    """Baselines by name; none: all."""
    controllers: tuple[str, ...]
    """Further controllers, FILE.py:NAME."""
    runs: tuple[Path, ...]


@dataclass(frozen=True)
class Outcome:
    """Of one game."""

    scores: dict[str, Floats]
    """Test scores by controller, an entry per instance."""
    added: dict[str, float]
    """Mean of the added parameters over the host's."""


def main(
    suites: tuple[str, ...] = UNSEEN,
    generated: tuple[int, int] = (2_000_000, 0),
    objective: Objective | None = None,
    instances: int = 64,
    each: int = 8,
    seed: int = 0,
    rent: float | None = None,
    arms: tuple[str, ...] = (),
    controllers: tuple[str, ...] = (),
    runs: tuple[Path, ...] = (),
) -> None:
    """Print a table per suite, and one of all generated suites.

    Args:
        suites: Suites that are reported by themselves.
        generated: The first generated suite's number, and how many.
        objective: Take only generated suites that are about this.
        instances: Of each suite.
        each: Instances of each generated suite.
        seed: Draws them.
        rent: Of all instances; by default each suite has its own.
        arms: Baselines; by default all.
        controllers: Further controllers, FILE.py:NAME.
        runs: Further policies, by the directories of their runs.
    """
    first, count = generated
    about = "" if objective is None else f" about {objective}"
    numbers = islice((number for number in itertools.count(first) if _is_about(number, objective)), count)
    for address in controllers:
        if not is_in_file(address):
            raise ConfigError(f"controller {address!r} is in no file: give FILE.py:NAME")
    others = rent, arms, controllers, runs
    games = [Game(*_find_suite(name), instances, seed, *others) for name in suites]
    games += [Game(f"{GENERATED}:{number}", "train", each, seed, *others) for number in numbers]
    with LocalWorkers(WORKERS) as workers:
        outcomes = workers.map(play, games)
    console = Console(width=110)
    for name, outcome in zip(suites, outcomes, strict=False):
        console.print(_table(f"{name}, {instances} instances", outcome.scores, outcome.added))
    if count:
        drawn = outcomes[len(suites) :]
        scores = {name: np.array([one.scores[name].mean() for one in drawn]) for name in drawn[0].scores}
        added = {name: float(np.mean([one.added[name] for one in drawn])) for name in scores}
        console.print(_table(f"{count} generated suites{about} from {first}, {each} instances of each", scores, added))


def _is_about(number: int, objective: Objective | None) -> bool:
    return objective in (None, get_suite(f"{GENERATED}:{number}").objective)


def _find_suite(name: str) -> tuple[str, Split]:
    """The suite's name for `get_suite`, and its split."""
    own, _, split = name.partition("/")
    if own in FILES:
        own = f"{FILES[own]}:{own}"
        allow_files(["--suite", own])
    return own, "transfer" if split else "heldout"


def play(game: Game) -> Outcome:
    """All controllers on the same instances."""
    suite = get_suite(game.suite)
    controllers = [one for one in create_baselines(suite) if not game.arms or one.name in game.arms]
    controllers += [load_controller(address, suite.steps) for address in game.controllers]
    controllers += [_policy_of(run, suite) for run in game.runs]
    drawn = (
        sample_for_evaluation(suite, game.split, game.instances, game.seed)
        if game.split != "train"
        else (suite.sample(game.instances, "train", np.random.default_rng(game.seed)))
    )
    if game.rent is not None:
        drawn = [replace(instance, rent=game.rent) for instance in drawn]
    with LocalWorkers(1) as workers:
        played = evaluate_controllers(workers, controllers, EvaluationConfig(suite.name, Rules()), drawn)
    named = list(zip((one.name for one in controllers), played, strict=True))
    return Outcome(
        {name: np.array([record.score for record in one.records]) for name, one in named},
        {name: float(np.mean([record.growth for record in one.records])) for name, one in named},
    )


def _policy_of(path: Path, suite: Suite) -> Controller:
    run = RunDirectory.open_training_run(path)
    origin = load_settings(PolicyOrigin, run.config)
    return restore_controller(run, origin, lambda rule: LookRule(rule, suite.steps), path.name)


def _table(title: str, scores: dict[str, Floats], added: dict[str, float]) -> Table:
    table = Table("controller", "score", "added", "less the rule", title=title, box=None)
    for name in sorted(scores, key=lambda name: -float(scores[name].mean())):
        less = scores[name] - scores[LookRule.name]
        error = less.std(ddof=1) / np.sqrt(len(less))
        difference = "" if name == LookRule.name else f"{less.mean():+.3f} ± {error:.3f}"
        table.add_row(name, f"{scores[name].mean():.3f}", f"{added[name]:+.0%}", difference)
    return table


if __name__ == "__main__":
    tyro.cli(main)
