"""What a contest asks: is the first way of training better than the others, are its policies better than other arms?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from esper.experiments.analysis import Claim
from esper.experiments.arms.field import Arm
from esper.experiments.arms.outcome import Outcome
from esper.experiments.compare.trials import Outcomes
from esper.experiments.comparison import Comparison, Entry, compare
from esper.experiments.statistics import Floats


def compare_configurations(outcomes: Mapping[str, Outcomes]) -> Comparison:
    """The first configuration and each other one, whose seeds are other trainings though they bear equal numbers."""
    entries = [Entry(name, own, _flops(own)) for name, own in outcomes.items()]
    return compare(entries, Claim.TRAINING, paired=False)


def compare_arms(arms: Sequence[Arm]) -> Comparison:
    """The first arm, which is the policy, and each other one: what follows from a seed's policy is paired with it."""
    return compare([_entry(arm) for arm in arms], Claim.TRAINING, paired=True)


def _entry(arm: Arm) -> Entry:
    outcomes = [records.outcomes for records in arm.seeds]
    steps = round(float(np.mean([records.environment_steps for records in arm.seeds])))
    return Entry(arm.name, outcomes, _flops(outcomes), steps)


def _flops(outcomes: Sequence[Sequence[Outcome]]) -> Floats:
    return np.array([[one.flops for one in own] for own in outcomes], np.float64)
