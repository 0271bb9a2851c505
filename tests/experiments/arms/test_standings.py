"""What is said of the policy and of every other arm follows from paired scores, and claims no more."""

from __future__ import annotations

import numpy as np
import pytest

from esper.experiments.arms.field import Arm
from esper.experiments.arms.outcome import ArmRecords, Outcome
from esper.experiments.arms.standings import BETTER, OPEN, TOO_FEW, Standing, standings
from esper.experiments.statistics import Floats

INSTANCES = 28
FAMILIES = [f"family {number % 7}" for number in range(INSTANCES)]
DIFFICULTY = np.random.default_rng(0).normal(0.6, 0.1, INSTANCES)


def arm(name: str, scores: Floats, steps: int = 100) -> Arm:
    """An arm with scores ``[N, M]``."""
    records = [
        ArmRecords(
            steps + seed,
            [
                Outcome(name, f"{family}/{number}", family, "", float(score), float(score) + 0.1, 30, 100, 5000)
                for number, (family, score) in enumerate(zip(FAMILIES, row, strict=True))
            ],
        )
        for seed, row in enumerate(scores)
    ]
    return Arm(name, records)


def scores(effect: float, seeds: int, stream: int) -> Floats:
    rng = np.random.default_rng(stream)
    return DIFFICULTY + effect + rng.normal(0, 0.01, (seeds, 1)) + rng.normal(0, 0.05, (seeds, INSTANCES))


def found(seeds: int = 5) -> dict[str, Standing]:
    policy = arm("policy", scores(0.1, seeds, 1))
    others = [
        arm("weak", scores(0.0, seeds, 2)),
        arm("strong", scores(0.2, seeds, 3)),
        arm("alike", scores(0.1, seeds, 4)),
        arm("fixed", scores(0.0, 1, 5), steps=0),
    ]
    return {one.arm: one for one in standings([policy, *others])}


def test_verdicts_name_the_better_one_where_there_is_one() -> None:
    verdicts = {name: one.against and one.against.verdict for name, one in found().items()}
    assert verdicts == {"policy": None, "weak": BETTER, "strong": "strong better", "alike": OPEN, "fixed": BETTER}


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_say_nothing(seeds: int) -> None:
    assert {one.against.verdict for one in found(seeds).values() if one.against} == {TOO_FEW}


def test_figures_are_means_over_seeds_and_instances() -> None:
    weak = found()["weak"]
    assert weak.score.estimate == pytest.approx(scores(0.0, 5, 2).mean())
    assert weak.accuracy.estimate == pytest.approx(scores(0.0, 5, 2).mean() + 0.1)
    assert (weak.growth.estimate, weak.flops.estimate) == pytest.approx((0.3, 5000))
    assert weak.environment_steps == 102
    assert weak.against is not None
    paired = scores(0.1, 5, 1) - scores(0.0, 5, 2)
    assert weak.against.difference.estimate == pytest.approx(paired.mean())
    assert weak.against.probability_of_improvement == pytest.approx((paired > 0).mean())


def test_an_arm_without_seeds_meets_every_seed_of_the_policy() -> None:
    fixed = found()["fixed"]
    assert fixed.against is not None
    assert fixed.against.difference.estimate == pytest.approx((scores(0.1, 5, 1) - scores(0.0, 1, 5)).mean())


def test_p_values_grow_with_the_number_of_arms() -> None:
    policy, weak = arm("policy", scores(0.02, 5, 1)), arm("weak", scores(0.0, 5, 2))
    alone, among = standings([policy, weak])[1], standings([policy, weak, weak, weak])[1]
    assert alone.against is not None
    assert among.against is not None
    assert among.against.p == pytest.approx(min(3 * alone.against.p, 1))
    assert among.against.difference == alone.against.difference
