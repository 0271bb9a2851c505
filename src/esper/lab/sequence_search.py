"""Search for a fixed sequence of actions, with as many environment steps as a policy's training took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.control.controller import Controller
from esper.control.rules.schedule import Planting, Schedule
from esper.lab.bench_suite import MOST_PLANTINGS, family_weights, schedule_of
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import Workers

SURVIVORS = 4
"""One candidate in this many goes on to the next round."""
FIRST_ROUND = 21
"""Instances per candidate in the first round, about."""
FINALISTS = 2
"""The last round decides between at least as many."""
LATEST = 0.6
"""Share of the episode after which nothing is planted: what comes later has hardly time to earn its rent."""
EARLY = 0.5
"""Share of the plantings that are as early as can be."""


@dataclass(frozen=True)
class FoundSequence:
    """The winner of a search."""

    sequence: Schedule
    environment_steps: int
    """What the search took: the budget, less a remainder that is too small for a fair comparison of the finalists."""


def search_sequence(
    config: EvaluationConfig,
    environment_steps: int,
    seed: int,
    workers: Workers,
    on_round: Callable[[int], None],
) -> FoundSequence:
    """Random search for a fixed sequence by sequential halving on training instances (Karnin et al. 2013, ICML).

    Rounds share the steps equally, and within a round all candidates play the same fresh instances; one in `SURVIVORS`
    goes on. Every step that is taken counts. ``on_round`` is called with the steps of each round.
    """
    suite, rng = get_suite(config.suite), numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    rounds, first = plan_rounds(environment_steps // suite.steps)
    drawn = [schedule_of(suite, draw_plantings(suite, rng)) for _ in range(first - 1)]
    candidates: list[Schedule] = [schedule_of(suite, []), *drawn]
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        scores, taken = score_controllers(candidates, config, suite.sample(count, "train", rng), workers)
        on_round(taken)
        left -= taken
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        order: list[int] = scores.argsort()[::-1][:survivors].tolist()
        candidates = [candidates[index] for index in order]
    return FoundSequence(candidates[0], environment_steps - left)


def plan_rounds(episodes: int) -> tuple[int, int]:
    """How many rounds that many episodes allow, and how many candidates in the first."""
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    return rounds, max(episodes // (rounds * FIRST_ROUND), 1)


def score_controllers(
    controllers: Sequence[Controller], config: EvaluationConfig, instances: Sequence[Instance], workers: Workers
) -> tuple[Floats, int]:
    """Mean scores, every family weighing the same, and the steps that were taken."""
    weights, results = family_weights(instances), evaluate_controllers(workers, controllers, config, instances)
    scores = np.array([np.array([record.score for record in one.records]) @ weights for one in results])
    return scores, sum(int(np.sum(log.running)) for one in results for log in one.logs)


def draw_plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    """Plantings in up to `MOST_PLANTINGS` different slots."""
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    latest = round(LATEST * suite.steps)
    return [
        Planting(
            0 if rng.random() < EARLY else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]
