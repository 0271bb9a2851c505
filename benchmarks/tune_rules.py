"""Tune the settings of a rule with as many environment steps as a policy's training takes, for train/tuned/SUITE.yaml.

    python benchmarks/tune_rules.py heuristic --environment-steps 230400 [--out FILE.yaml]

Random search by successive halving on training instances: rounds share the steps equally, and each keeps one candidate
in four and plays four times as many instances.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console

from esper.config.loading import format_settings
from esper.config.settings import Settings
from esper.control.controller import Controller
from esper.control.rules import Heuristic, HeuristicSettings, Periodic, PeriodicSettings
from esper.errors import ConfigError, EsperError
from esper.lab.experiment import FIRST_ROUND, SURVIVORS, plan_rounds, score_controllers
from esper.lifecycle.rules import Rules
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers, Workers

WORKERS = 2
TRIALS = (1, 2, 3, 4, 6, 8, 10, 12)
MARGINS = (-0.05, -0.02, 0.0, 0.02, 0.05, 0.1)
ENDS = (0.3, 0.45, 0.6, 0.75)


@dataclass(frozen=True)
class TuningResult:
    """The winner of a search."""

    settings: Settings
    score: float
    """Mean score on the instances of the last round, which the winner was chosen on: optimistic."""
    environment_steps: int
    """What the search took."""


def tune(kind: str, suite: Suite, rules: Rules, environment_steps: int, seed: int, workers: Workers) -> TuningResult:
    """Search for settings of the rule ``heuristic`` or ``periodic``.

    Raises:
        ConfigError: the steps are too few for one candidate.
    """
    fewest = FIRST_ROUND * suite.steps
    if environment_steps < fewest:
        raise ConfigError(
            f"--environment-steps {environment_steps}: one candidate takes {fewest}, on {FIRST_ROUND} instances"
        )
    draw, build = KINDS[kind]
    rng, config = numpy_generator(seed, Stream.TUNING), EvaluationConfig(suite.name, rules)
    rounds, first = plan_rounds(environment_steps // suite.steps)
    candidates = [draw(suite, rng) for _ in range(first)]
    used, count, scores = 0, FIRST_ROUND, np.zeros(0)
    for number in range(rounds):
        instances = suite.sample(count, "train", rng)
        scores = score_controllers([build(one, suite.steps) for one in candidates], config, instances, workers)[0]
        used += len(candidates) * count * suite.steps
        survivors = 1 if number == rounds - 1 else max(len(candidates) // SURVIVORS, 1)
        order = scores.argsort()[::-1][:survivors].tolist()
        candidates, scores = [candidates[index] for index in order], scores[order]
        count *= SURVIVORS
    return TuningResult(candidates[0], float(scores[0]), used)


def draw_pairs(suite: Suite, rng: np.random.Generator, most: int) -> tuple[tuple[int, int], ...]:
    """Up to so many different pairs of slot and blueprint, in an order."""
    pairs = [(slot, kind) for slot in range(len(suite.sites)) for kind in range(len(suite.blueprints))]
    order: list[int] = rng.permutation(len(pairs)).tolist()
    return tuple(pairs[index] for index in order[: int(rng.integers(1, most + 1))])


def pick(rng: np.random.Generator, choices: Sequence[float]) -> float:
    """One of the choices."""
    return choices[int(rng.integers(len(choices)))]


def draw_heuristic(suite: Suite, rng: np.random.Generator) -> HeuristicSettings:
    """A candidate for `Heuristic`."""
    return HeuristicSettings(
        preferences=draw_pairs(suite, rng, 6),
        patience=pick(rng, (0, 0, 0, 1, 2, 3)),
        at_a_time=int(rng.integers(1, 4)),
        most=int(rng.integers(1, 4)),
        probation=int(pick(rng, TRIALS)),
        margin=pick(rng, MARGINS),
        stop_after=pick(rng, ENDS),
        narrowest=pick(rng, (0.0, 0.0, 0.5, 1.0)),
    )


def draw_periodic(suite: Suite, rng: np.random.Generator) -> PeriodicSettings:
    """A candidate for `Periodic`."""
    return PeriodicSettings(
        period=int(pick(rng, (1, 2, 3, 4, 6, 8))),
        plantings=draw_pairs(suite, rng, 4),
        probation=int(pick(rng, TRIALS)),
        margin=pick(rng, MARGINS),
        stop_after=pick(rng, (0.0, 0.05, 0.1, *ENDS)),
    )


KINDS: dict[str, tuple[Callable[[Suite, np.random.Generator], Any], Callable[[Any, int], Controller]]] = {
    "heuristic": (draw_heuristic, Heuristic),
    "periodic": (draw_periodic, Periodic),
}
"""How candidates are drawn and built."""


def main(
    rule: Annotated[Literal["heuristic", "periodic"], tyro.conf.Positional],
    suite: str = "tokens",
    environment_steps: int = 400_000,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Tune a rule on a suite and print the winner's settings, which go to the file ``out``, too."""
    began = time.perf_counter()
    with LocalWorkers(WORKERS) as workers:
        rules = TrainSettings(suite=suite).rules
        tuned = tune(rule, get_suite(suite), rules, environment_steps, seed, workers)
    text = format_settings(tuned.settings)
    seconds = time.perf_counter() - began
    console = Console()
    console.print(text, markup=False)
    console.print(f"score {tuned.score:.3f} on the instances of the last round (optimistic: chosen there)")
    console.print(f"{tuned.environment_steps} environment steps, {seconds:.0f} s")
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except EsperError as error:
        sys.exit(f"error: {error}")
