"""How a learned policy stands against every other arm, with training seeds as units and instances paired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.experiments.arms.crossed import CrossedTest, crossed_interval, crossed_test
from esper.experiments.arms.field import Arm
from esper.experiments.arms.outcome import Outcome
from esper.experiments.statistics import LEVEL, Floats, Interval, holm

SIGNIFICANCE = 1 - LEVEL
FEWEST_SEEDS = 3
"""With two, the spread between them has a single degree of freedom: the interval reaches 13 standard errors out."""

BETTER = "policy better"
OPEN = "no difference shown"
TOO_FEW = "too few seeds to say"


@dataclass(frozen=True)
class Against:
    """The policy paired with another arm, instance by instance and seed by seed."""

    difference: Interval
    """Mean score of the policy less the arm's."""
    p: float
    """Two-sided, adjusted for the number of arms (Holm)."""
    probability_of_improvement: float
    """Share of the pairs in which the policy scores higher; ties count half."""
    verdict: str


@dataclass(frozen=True)
class Standing:
    """An arm's figures; intervals are over seeds and instances."""

    arm: str
    score: Interval
    accuracy: Interval
    """On test data."""
    growth: Interval
    """Added parameters over the host's."""
    flops: Interval
    """Of training one network."""
    environment_steps: int
    """Decisions of single networks that finding the arm took; the mean over seeds."""
    against: Against | None
    """None for the policy itself."""


def standings(arms: Sequence[Arm]) -> list[Standing]:
    """The arms in their order, of which the first is the policy.

    An arm that does not depend on training seeds is the same for each of them.
    """
    policy, *others = arms
    families = [outcome.family for outcome in policy.seeds[0].outcomes]
    own = _table(policy, _score)
    differences = [own - _table(arm, _score) for arm in others]
    tested = [crossed_test(values, families) for values in differences]
    adjusted = holm([one.p for one in tested])
    compared = [
        _against(arm.name, values, replace(one, p=p))
        for arm, values, one, p in zip(others, differences, tested, adjusted, strict=True)
    ]
    return [_standing(arm, families, against) for arm, against in zip(arms, [None, *compared], strict=True)]


def _against(arm: str, differences: Floats, tested: CrossedTest) -> Against:
    wins = np.where(differences == 0, 0.5, differences > 0)
    return Against(tested.interval, tested.p, float(wins.mean()), _verdict(arm, len(differences), tested))


def _verdict(arm: str, seeds: int, tested: CrossedTest) -> str:
    if seeds < FEWEST_SEEDS:
        return TOO_FEW
    if tested.p > SIGNIFICANCE:
        return OPEN
    return BETTER if tested.interval.estimate > 0 else f"{arm} better"


def _standing(arm: Arm, families: Sequence[str], against: Against | None) -> Standing:
    def over_all(measure: Callable[[Outcome], float]) -> Interval:
        return crossed_interval(_table(arm, measure), families)

    return Standing(
        arm.name,
        over_all(_score),
        over_all(lambda one: one.test_accuracy),
        over_all(lambda one: one.growth),
        over_all(lambda one: one.flops),
        round(float(np.mean([records.environment_steps for records in arm.seeds]))),
        against,
    )


def _score(outcome: Outcome) -> float:
    return outcome.score


def _table(arm: Arm, measure: Callable[[Outcome], float]) -> Floats:
    """``[N, M]``, or ``[1, M]`` of an arm that does not depend on seeds."""
    return np.array([[measure(outcome) for outcome in records.outcomes] for records in arm.seeds], np.float64)
