"""Comparisons of a policy and other arms, as tests need them."""

from __future__ import annotations

from esper.lab.analysis import Claim, Difference, Interval, Verdict
from esper.lab.comparison import ArmSummary, Comparison


def around(value: float, half: float = 0.01) -> Interval:
    return Interval(value, value - half, value + half)


def ahead(difference: float, p: float, better: float, verdict: Verdict) -> Difference:
    return Difference(difference, around(difference), p, verdict, better)


def standing(name: str, score: float, difference: Difference | None) -> ArmSummary:
    accuracy, growth, flops = around(score + 0.05), around(0.5, 0.1), around(90e6, 1e6)
    return ArmSummary(name, around(score), score + 0.003, (score,) * 5, accuracy, growth, flops, 230_400, difference)


STANDINGS = [
    standing("policy", 0.7, None),
    standing("none", 0.5, ahead(0.2, 0.0004, 0.96, Verdict.ABOVE)),
    standing("static_equal_flops", 0.7, ahead(-0.001, 0.8, 0.5, Verdict.OPEN)),
    standing("sequence", 0.75, ahead(-0.05, 0.012, 0.3, Verdict.BELOW)),
]
ARMS = Comparison(Claim.TRAINING, 5, 256, STANDINGS, {"order": {one.name: 0.5 for one in STANDINGS}})
