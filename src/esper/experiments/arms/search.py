"""The best fixed sequence of plantings that can be found with as many environment steps as a policy's training took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from esper.control.rules.schedule import Planting, Schedule
from esper.experiments.bench_suite import family_weights
from esper.experiments.play import Terms, play
from esper.experiments.schedules import MOST_PLANTINGS, schedule_of
from esper.experiments.tuning import FIRST_ROUND, SURVIVORS
from esper.experiments.workers import Workers
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite

_STREAM = 22
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
    terms: Terms, environment_steps: int, seed: int, workers: Workers, spent: Callable[[int], None]
) -> FoundSequence:
    """Random search by sequential halving on training instances (Karnin et al. 2013, ICML).

    Rounds share the steps equally, and within a round all candidates play the same fresh instances; one in `SURVIVORS`
    goes on. Every step that is taken counts. ``spent`` is told the steps of each round.
    """
    suite = get_suite(terms.suite)
    rng = np.random.default_rng((seed, _STREAM))
    episodes = environment_steps // suite.steps
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    candidates = _candidates(suite, max(episodes // (rounds * FIRST_ROUND), 1), rng)
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        instances = suite.sample(count, "train", rng)
        weights = family_weights(instances)
        played = play(workers, candidates, terms, instances)
        taken = sum(int(np.sum(tally.running)) for one in played for tally in one.tallies)
        spent(taken)
        left -= taken
        scores = np.array([np.array([record.score for record in one.records]) @ weights for one in played])
        order: list[int] = scores.argsort()[::-1].tolist()
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        candidates = [candidates[index] for index in order[:survivors]]
    return FoundSequence(candidates[0], environment_steps - left)


def _candidates(suite: Suite, count: int, rng: np.random.Generator) -> list[Schedule]:
    """Doing nothing, and random plantings in up to `MOST_PLANTINGS` different slots."""
    return [schedule_of(suite, []), *(schedule_of(suite, _plantings(suite, rng)) for _ in range(count - 1))]


def _plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    latest = round(LATEST * suite.steps)
    return [
        Planting(
            0 if rng.random() < EARLY else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]
