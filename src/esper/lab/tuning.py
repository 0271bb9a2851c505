"""Search for tuned rules and for fixed sequences, with as many environment steps as a policy's training takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.config.settings import Settings
from esper.control.controller import Controller
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.look import LookRule, LookSettings
from esper.control.rules.schedule import Periodic, PeriodicSettings, Planting, Schedule
from esper.lab.bench_suite import MOST_PLANTINGS, family_weights, schedule_of
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import Workers

SURVIVORS = 4
"""One candidate in this many goes on to the next round, which plays as many times the instances."""
FIRST_ROUND = 21
"""Instances per candidate in the first round."""
TRIALS = (1, 2, 3, 4, 6, 8, 10, 12)
MARGINS = (-0.05, -0.02, 0.0, 0.02, 0.05, 0.1)
ENDS = (0.3, 0.45, 0.6, 0.75)


FINALISTS = 2
"""The last round of a search for a sequence decides between at least as many."""
LATEST = 0.6
"""Share of the episode after which nothing is planted: what comes later has hardly time to earn its rent."""
EARLY = 0.5
"""Share of the plantings that are as early as can be."""


@dataclass(frozen=True)
class TuningResult:
    """The winner of a search."""

    settings: Settings
    score: float
    """Mean score on the instances of the last round, which the winner was chosen on: optimistic."""
    environment_steps: int
    """What the search took."""


def tune(kind: str, suite: Suite, rules: Rules, environment_steps: int, seed: int, workers: Workers) -> TuningResult:
    """Random search by successive halving on training instances.

    ``kind`` is ``heuristic``, ``look`` or ``periodic``. Rounds share the steps equally: each keeps one candidate in
    `SURVIVORS` and plays `SURVIVORS` times as many instances.
    """
    draw, build = _KINDS[kind]
    rng, terms = numpy_generator(seed, Stream.TUNING), EvaluationConfig(suite.name, rules)
    rounds, first = _plan_rounds(environment_steps // suite.steps)
    candidates: list[Settings] = [draw(suite, rng) for _ in range(first)]
    used, count, scores = 0, FIRST_ROUND, np.zeros(0)
    for number in range(rounds):
        instances = suite.sample(count, "train", rng)
        scores = _score([build(one, suite.steps) for one in candidates], terms, instances, workers)[0]
        used += len(candidates) * count * suite.steps
        survivors = 1 if number == rounds - 1 else max(len(candidates) // SURVIVORS, 1)
        order = _best(scores, survivors)
        candidates, scores = [candidates[index] for index in order], scores[order]
        count *= SURVIVORS
    return TuningResult(candidates[0], float(scores[0]), used)


@dataclass(frozen=True)
class FoundSequence:
    """The winner of a search."""

    sequence: Schedule
    environment_steps: int
    """What the search took: the budget, less a remainder that is too small for a fair comparison of the finalists."""


def search_sequence(
    terms: EvaluationConfig, environment_steps: int, seed: int, workers: Workers, spent: Callable[[int], None]
) -> FoundSequence:
    """Random search for a fixed sequence by sequential halving on training instances (Karnin et al. 2013, ICML).

    Rounds share the steps equally, and within a round all candidates play the same fresh instances; one in `SURVIVORS`
    goes on. Every step that is taken counts. ``spent`` is told the steps of each round.
    """
    suite, rng = get_suite(terms.suite), numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    rounds, first = _plan_rounds(environment_steps // suite.steps)
    candidates = [
        schedule_of(suite, []),
        *(schedule_of(suite, _draw_plantings(suite, rng)) for _ in range(first - 1)),
    ]
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        scores, taken = _score(candidates, terms, suite.sample(count, "train", rng), workers)
        spent(taken)
        left -= taken
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        candidates = [candidates[index] for index in _best(scores, survivors)]
    return FoundSequence(candidates[0], environment_steps - left)


def _plan_rounds(episodes: int) -> tuple[int, int]:
    """How many rounds that many episodes allow, and how many candidates in the first."""
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    return rounds, max(episodes // (rounds * FIRST_ROUND), 1)


def _score(
    controllers: Sequence[Controller], terms: EvaluationConfig, instances: Sequence[Instance], workers: Workers
) -> tuple[Floats, int]:
    """Mean scores, every family weighing the same, and the steps that were taken."""
    weights, played = family_weights(instances), evaluate_controllers(workers, controllers, terms, instances)
    scores = np.array([np.array([record.score for record in one.records]) @ weights for one in played])
    return scores, sum(int(np.sum(log.running)) for one in played for log in one.logs)


def _best(scores: Floats, count: int) -> list[int]:
    """Indices, the best first."""
    return scores.argsort()[::-1][:count].tolist()


def _draw_plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    """In up to `MOST_PLANTINGS` different slots."""
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    latest = round(LATEST * suite.steps)
    return [
        Planting(
            0 if rng.random() < EARLY else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]


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


def _draw_look(_: Suite, rng: np.random.Generator) -> LookSettings:
    return LookSettings(
        fitted=_pick(rng, (0.25, 0.5, 0.75)),
        price=_pick(rng, (0.0, 0.05, 0.1, 0.15, 0.2)),
        threshold=_pick(rng, (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)),
        trial=int(_pick(rng, TRIALS)),
        margin=_pick(rng, MARGINS),
        stop_after=_pick(rng, ENDS),
    )


def _build_look(settings: Settings, horizon: int) -> Controller:
    assert isinstance(settings, LookSettings)
    return LookRule(settings, horizon)


def _build_heuristic(settings: Settings, horizon: int) -> Controller:
    assert isinstance(settings, HeuristicSettings)
    return Heuristic(settings, horizon)


def _build_periodic(settings: Settings, horizon: int) -> Controller:
    assert isinstance(settings, PeriodicSettings)
    return Periodic(settings, horizon)


_KINDS: dict[str, tuple[Callable[[Suite, np.random.Generator], Settings], Callable[[Settings, int], Controller]]] = {
    "heuristic": (_draw_heuristic, _build_heuristic),
    "look": (_draw_look, _build_look),
    "periodic": (_draw_periodic, _build_periodic),
}
"""How candidates are drawn and built."""
