"""Standings of a policy and other arms, as tests need them."""

from __future__ import annotations

from esper.experiments.arms.standings import BETTER, OPEN, Against, Standing
from esper.experiments.statistics import Interval


def around(value: float, half: float = 0.01) -> Interval:
    return Interval(value, value - half, value + half)


def standing(arm: str, score: float, against: Against | None) -> Standing:
    return Standing(arm, around(score), around(score + 0.05), around(0.5, 0.1), around(90e6, 1e6), 230_400, against)


STANDINGS = [
    standing("policy", 0.7, None),
    standing("none", 0.5, Against(around(0.2), 0.0004, 0.96, BETTER)),
    standing("static_equal_flops", 0.7, Against(around(-0.001), 0.8, 0.5, OPEN)),
    standing("sequence", 0.75, Against(around(-0.05), 0.012, 0.3, "sequence better")),
]
