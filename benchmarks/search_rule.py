"""How much the numbers of the look-ahead rule matter: a designed experiment on suites, at their rents and at rent 0.

    python benchmarks/search_rule.py FOLDER --configurations 32 --workers 2

Optuna's quasi-random sampler draws configurations that fill the ranges in `RANGES` evenly. All of them play the same
instances of every suite. The table has the score of the present settings, of the rule of release 0.2 and of growing
nothing, and for each number its main effect: by how much the score changes, in a linear fit over all configurations, if
the number moves by one standard deviation of its range. Each suite's mean scores are a line of FOLDER/scores.jsonl;
stopped, the same command goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import tyro
from former_rule import FormerLook
from rich.console import Console
from rich.table import Table

from esper.control.controller import Controller, get_promise_settings
from esper.control.rules import LookRule, LookSettings, Never
from esper.dash.output import print_line
from esper.errors import EsperError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.tasks.registry import GENERATED, get_suite
from esper.tasks.suite_files import allow_files
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from esper.train.workers import LocalWorkers

HERE = Path(__file__).parent
CHOOSING = (
    "tokens",
    f"{HERE / 'unseen_suites.py'}:compass",
    f"{HERE / 'unseen_suites.py'}:recurrent",
    f"{HERE.parent / 'examples' / 'own_suite.py'}:rings",
)
"""Suites that rules may be chosen on; `strange_suites.py` is for reporting."""
GENERATED_SUITES = range(9100, 9112)
"""Generated suites for choosing: no table that reports a rule has them."""
RANGES: dict[str, tuple[float, float]] = {
    "standard_errors": (-0.5, 2.5),
    "size": (0.0, 0.4),
    "price": (0.0, 3.0),
    "threshold": (0.0, 0.1),
    "early": (0.08, 0.4),
    "probation": (2, 6),
    "first": (1, 3),
}
"""Least and largest value of each number of the rule; ``first`` is the decision of the first look."""
COHORT = 96
"""Most networks side by side."""
PRESENT, FORMER = "present", "former_look"


@dataclass(frozen=True)
class Game:
    """Some controllers on instances of one suite; any process may compute it."""

    suite: str
    rent: float | None
    """None: the rents of the suite."""
    instances: int
    names: tuple[str, ...]
    controllers: tuple[Callable[[int], Controller], ...]
    """Each makes a controller for episodes of so many decisions."""


def main(
    folder: tyro.conf.Positional[Path],
    configurations: int = 32,
    instances: int = 8,
    each: int = 3,
    workers: int = 1,
) -> None:
    """Play what is not there yet, and print the table.

    Args:
        folder: Keeps the scores.
        configurations: Number of configurations.
        instances: Of each suite in `CHOOSING`.
        each: Instances of each generated suite.
        workers: Processes.
    """
    console, file = Console(width=150), folder / "scores.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    allow_files([part for name in CHOOSING for part in ("--suite", name)])
    drawn = draw_configurations(configurations)
    makers: dict[str, Callable[[int], Controller]] = {PRESENT: MakeRule({}), FORMER: FormerLook, Never.name: make_never}
    makers |= {f"configuration {number}": MakeRule(values) for number, values in enumerate(drawn)}

    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["suite"], line["rent"]) for line in lines}
    suites = [*CHOOSING, *(f"{GENERATED}:{number}" for number in GENERATED_SUITES)]
    games = [
        Game(suite, rent, instances if suite in CHOOSING else each, tuple(makers), tuple(makers.values()))
        for suite, rent in product(suites, (0.0, None))
        if (_shorten(suite), rent) not in done
    ]
    with LocalWorkers(workers) as pool:
        for place, scores in pool.as_completed(play, games):
            line = {"suite": _shorten(games[place].suite), "rent": games[place].rent, "scores": scores}
            lines.append(line)
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print_line(console, f"{line['suite']}, rent {_name_rent(line['rent'])}: {scores[PRESENT]:.3f}")
    console.print(tabulate(lines, drawn))


@dataclass(frozen=True)
class MakeRule:
    """Makes the rule with some numbers of its own."""

    values: Mapping[str, float]

    def __call__(self, horizon: int) -> Controller:
        """The rule for episodes of so many decisions."""
        values: dict[str, Any] = dict(self.values)
        promise = PromiseSettings(first=int(values.pop("first", PromiseSettings().first)))
        return LookRule(LookSettings.model_validate({**values, "promise": promise}), horizon)


def make_never(_: int) -> Controller:
    """No growth."""
    return Never()


def draw_configurations(count: int) -> list[dict[str, float]]:
    """``count`` points that fill `RANGES` evenly, the same each time."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        sampler=optuna.samplers.QMCSampler(seed=1, scramble=True, warn_independent_sampling=False)
    )
    points: list[dict[str, float]] = []
    for _ in range(count):
        trial = study.ask()
        points.append(
            {
                name: trial.suggest_int(name, low, high)
                if isinstance(low, int) and isinstance(high, int)
                else round(trial.suggest_float(name, low, high), 3)
                for name, (low, high) in RANGES.items()
            }
        )
        study.tell(trial, 0.0)
    return points


def play(game: Game) -> dict[str, float]:
    """Mean test score of every controller on the same instances."""
    suite = get_suite(game.suite)
    instances = suite.sample(game.instances, "train", np.random.default_rng(0))
    if game.rent is not None:
        instances = [replace(instance, rent=game.rent) for instance in instances]
    # Controllers that measure promises at other times cannot share a cohort.
    groups: dict[PromiseSettings | None, list[tuple[str, Controller]]] = {}
    for name, make in zip(game.names, game.controllers, strict=True):
        controller = make(suite.steps)
        groups.setdefault(get_promise_settings(controller), []).append((name, controller))
    scores: dict[str, float] = {}
    size = max(COHORT // game.instances, 1)
    for group in groups.values():
        config = EvaluationConfig(suite.name, Rules()).for_controller(group[0][1])
        for start in range(0, len(group), size):
            part = group[start : start + size]
            played = evaluate_cohort(CohortTask(config, [CohortPart(one, instances) for _, one in part]))
            for (name, _), result in zip(part, played, strict=True):
                scores[name] = float(np.mean([record.score for record in result.records]))
    return scores


def tabulate(lines: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, float]]) -> Table:
    """Scores and main effects: a row per suite and rent, and one for the generated suites together."""
    columns = ("suite", "rent", PRESENT, f"less {FORMER}", "less none", "mean of all less former", *RANGES)
    table = Table(*columns, title="Main effects: change of the score per standard deviation of a number", box=None)
    numbers = np.array([[one[name] for name in RANGES] for one in drawn], np.float64)
    design = np.column_stack([np.ones(len(drawn)), (numbers - numbers.mean(0)) / numbers.std(0)])
    for rent in (0.0, None):
        rows = {line["suite"]: _summarise(line["scores"], design) for line in lines if line["rent"] == rent}
        for suite in (name for name in map(_shorten, CHOOSING) if name in rows):
            table.add_row(suite, _name_rent(rent), *(f"{value:+.3f}" for value in rows[suite]))
        generated = np.array([row for suite, row in rows.items() if suite.startswith(GENERATED)])
        if len(generated) > 1:
            errors = generated.std(0, ddof=1) / np.sqrt(len(generated))
            cells = [f"{mean:+.3f} ± {error:.3f}" for mean, error in zip(generated.mean(0), errors, strict=True)]
            table.add_row(f"{len(generated)} generated", _name_rent(rent), *cells)
    return table


def _summarise(scores: Mapping[str, float], design: Floats) -> Floats:
    """The figures of a row, from the score of the present settings on."""
    of_all = np.array([score for name, score in scores.items() if name.startswith("configuration")])
    effects = np.linalg.lstsq(design, of_all, rcond=None)[0][1:]
    present, former, none = (scores[name] for name in (PRESENT, FORMER, Never.name))
    return np.array([present, present - former, present - none, of_all.mean() - former, *effects])


def _shorten(suite: str) -> str:
    """The name without the file."""
    return suite if suite.startswith(GENERATED) else suite.rpartition(":")[2]


def _name_rent(rent: float | None) -> str:
    return "own" if rent is None else f"{rent:g}"


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except EsperError as error:
        sys.exit(f"error: {error}")
