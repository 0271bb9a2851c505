"""Is the policy better than the others, and how surely? Answers from results on the same instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from esper.control.learned import Learned
from esper.experiments.results import Result
from esper.experiments.statistics import (
    LEVEL,
    Floats,
    Interval,
    bootstrap_interval,
    holm,
    interquartile_mean,
    paired_difference,
    paired_permutation_p,
    probability_of_improvement,
)

POLICY = Learned.name
SIGNIFICANCE = 1 - LEVEL
_SEED = 0
"""Of the resampling: equal results give equal intervals."""


class Verdict(StrEnum):
    """How the policy stands against another controller."""

    ABOVE = "above"
    BELOW = "below"
    OPEN = "not told apart"


@dataclass(frozen=True)
class Against:
    """The policy paired with another controller."""

    difference: Interval
    """Mean score of the policy minus the other's."""
    improvement: Interval
    """Probability that the policy scores higher on an instance."""
    p: float
    """Of the mean difference, two-sided, adjusted for the number of controllers (Holm)."""

    @property
    def verdict(self) -> Verdict:
        """Above or below only if both the interval and the adjusted test say so."""
        if self.p > SIGNIFICANCE:
            return Verdict.OPEN
        if self.difference.above_zero:
            return Verdict.ABOVE
        return Verdict.BELOW if self.difference.below_zero else Verdict.OPEN


@dataclass(frozen=True)
class Standing:
    """A controller's figures over all instances."""

    controller: str
    score: Interval
    middle: Interval
    """Interquartile mean of the score."""
    accuracy: Interval
    growth: Interval
    """Added parameters over the host's."""
    against: Against | None
    """The policy against this controller; None for the policy itself."""


@dataclass(frozen=True)
class Comparison:
    """All controllers on the instances of one split, best mean score first."""

    instances: int
    standings: list[Standing]
    family_scores: dict[str, dict[str, float]]
    """Mean score by family and controller."""

    @property
    def policy(self) -> Standing:
        """The policy's own figures."""
        return next(one for one in self.standings if one.against is None)

    @property
    def others(self) -> list[Standing]:
        """Everyone else's."""
        return [one for one in self.standings if one.against is not None]


def compare(results: Sequence[Result]) -> Comparison:
    """Compare the policy with every other controller in ``results``, which all played the same instances.

    Raises:
        ValueError: the policy is missing, or a controller played other instances.
    """
    by_controller: dict[str, list[Result]] = {}
    for result in results:
        by_controller.setdefault(result.controller, []).append(result)
    own = by_controller.get(POLICY)
    if own is None:
        raise ValueError(f"there are no results of {POLICY!r}")
    played = [result.instance for result in own]
    for name, theirs in by_controller.items():
        if [result.instance for result in theirs] != played:
            raise ValueError(f"{name} did not play the same instances as {POLICY}")
    rng = np.random.default_rng(_SEED)
    others = {name: theirs for name, theirs in by_controller.items() if name != POLICY}
    raw = [paired_permutation_p(_scores(own), _scores(theirs), rng) for theirs in others.values()]
    adjusted = dict(zip(others, holm(raw), strict=True))
    standings = [_standing(name, theirs, own, adjusted.get(name), rng) for name, theirs in by_controller.items()]
    standings.sort(key=lambda one: one.score.estimate, reverse=True)
    return Comparison(len(played), standings, _family_scores(by_controller))


def _standing(
    name: str, theirs: list[Result], own: list[Result], p: float | None, rng: np.random.Generator
) -> Standing:
    strata = [result.family for result in own]
    scores = _scores(theirs)
    accuracy = np.array([result.test_accuracy for result in theirs])
    growth = np.array([result.growth for result in theirs])
    against = None
    if p is not None:
        against = Against(
            paired_difference(_scores(own), scores, strata, rng),
            probability_of_improvement(_scores(own), scores, strata, rng),
            p,
        )
    return Standing(
        name,
        bootstrap_interval(scores, strata, rng),
        bootstrap_interval(scores, strata, rng, interquartile_mean),
        bootstrap_interval(accuracy, strata, rng),
        bootstrap_interval(growth, strata, rng),
        against,
    )


def _scores(results: Sequence[Result]) -> Floats:
    return np.array([result.score for result in results])


def _family_scores(by_controller: dict[str, list[Result]]) -> dict[str, dict[str, float]]:
    families = sorted({result.family for results in by_controller.values() for result in results})
    return {
        family: {
            name: float(np.mean([result.score for result in results if result.family == family]))
            for name, results in by_controller.items()
        }
        for family in families
    }
