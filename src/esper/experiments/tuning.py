"""Tune the hand-written controllers by search, with as many environment steps as a policy's training may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.control.controller import Controller
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.schedule import Periodic, PeriodicSettings
from esper.experiments.bench_suite import family_weights
from esper.experiments.evaluation import EvaluationConfig, evaluate_controllers
from esper.experiments.workers import Workers
from esper.lifecycle.rules import Rules
from esper.random_streams import Stream, numpy_generator
from esper.settings import Settings
from esper.tasks.suite import Suite

SURVIVORS = 4
"""One candidate in this many goes on to the next round, which plays as many times the instances."""
FIRST_ROUND = 21
"""Instances per candidate in the first round."""
TRIALS = (1, 2, 3, 4, 6, 8, 10, 12)
MARGINS = (-0.05, -0.02, 0.0, 0.02, 0.05, 0.1)
ENDS = (0.3, 0.45, 0.6, 0.75)


@dataclass(frozen=True)
class Tuned:
    """The winner of a search."""

    settings: Settings
    score: float
    """Mean score on the instances of the last round, which the winner was chosen on: optimistic."""
    environment_steps: int
    """What the search took."""


def tune(kind: str, suite: Suite, rules: Rules, environment_steps: int, seed: int, workers: Workers) -> Tuned:
    """Random search by successive halving on training instances.

    ``kind`` is ``heuristic`` or ``periodic``. Rounds share the steps equally: each keeps one candidate in
    `SURVIVORS` and plays `SURVIVORS` times as many instances.
    """
    draw, build = _KINDS[kind]
    rng = numpy_generator(seed, Stream.TUNING)
    episodes = environment_steps // suite.steps
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    first = max(episodes // (rounds * FIRST_ROUND), 1)
    candidates: list[Settings] = [draw(suite, rng) for _ in range(first)]
    used, count, scores = 0, FIRST_ROUND, np.zeros(0)
    for number in range(rounds):
        instances = suite.sample(count, "train", rng)
        weights = family_weights(instances)
        contestants = [build(one, suite.steps) for one in candidates]
        played = evaluate_controllers(workers, contestants, EvaluationConfig(suite.name, rules), instances)
        scores = np.array([np.array([record.score for record in one.records]) @ weights for one in played])
        used += len(candidates) * count * suite.steps
        order: list[int] = scores.argsort()[::-1].tolist()
        survivors = 1 if number == rounds - 1 else max(len(candidates) // SURVIVORS, 1)
        candidates, scores = [candidates[index] for index in order[:survivors]], scores[order[:survivors]]
        count *= SURVIVORS
    return Tuned(candidates[0], float(scores[0]), used)


def _preferences(suite: Suite, rng: np.random.Generator, most: int) -> tuple[tuple[int, int], ...]:
    pairs = [(slot, kind) for slot in range(len(suite.sites)) for kind in range(len(suite.blueprints))]
    order: list[int] = rng.permutation(len(pairs)).tolist()
    return tuple(pairs[index] for index in order[: int(rng.integers(1, most + 1))])


def _pick(rng: np.random.Generator, choices: Sequence[float]) -> float:
    return choices[int(rng.integers(len(choices)))]


def _draw_heuristic(suite: Suite, rng: np.random.Generator) -> HeuristicSettings:
    return HeuristicSettings(
        preferences=_preferences(suite, rng, 6),
        patience=_pick(rng, (0, 0, 0, 1, 2, 3)),
        at_a_time=int(rng.integers(1, 4)),
        most=int(rng.integers(1, 4)),
        trial=int(_pick(rng, TRIALS)),
        margin=_pick(rng, MARGINS),
        stop_after=_pick(rng, ENDS),
        narrowest=_pick(rng, (0.0, 0.0, 0.5, 1.0)),
    )


def _draw_periodic(suite: Suite, rng: np.random.Generator) -> PeriodicSettings:
    return PeriodicSettings(
        period=int(_pick(rng, (1, 2, 3, 4, 6, 8))),
        plantings=_preferences(suite, rng, 4),
        trial=int(_pick(rng, TRIALS)),
        margin=_pick(rng, MARGINS),
        stop_after=_pick(rng, (0.0, 0.05, 0.1, *ENDS)),
    )


def _build_heuristic(settings: Settings, horizon: int) -> Controller:
    assert isinstance(settings, HeuristicSettings)
    return Heuristic(settings, horizon)


def _build_periodic(settings: Settings, horizon: int) -> Controller:
    assert isinstance(settings, PeriodicSettings)
    return Periodic(settings, horizon)


_KINDS: dict[str, tuple[Callable[[Suite, np.random.Generator], Settings], Callable[[Settings, int], Controller]]] = {
    "heuristic": (_draw_heuristic, _build_heuristic),
    "periodic": (_draw_periodic, _build_periodic),
}
"""How candidates are drawn and built."""
