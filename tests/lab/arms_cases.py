"""Comparisons of a policy and other arms, as tests need them."""

from esper.lab.analysis import Claim, Comparison, Verdict
from esper.train.results import ArmRecord, Bounds


def around(value: float, half: float = 0.01) -> Bounds:
    return value - half, value + half


def arm(
    name: str,
    score: float,
    verdict: str | None = None,
    difference: float | None = None,
    p: float | None = None,
    better: float | None = None,
) -> ArmRecord:
    return ArmRecord(
        name=name,
        score=score,
        score_interval=around(score),
        interquartile_mean=score + 0.003,
        by_seed=(score,) * 5,
        accuracy=score + 0.05,
        accuracy_interval=around(score + 0.05),
        added=0.5,
        added_interval=around(0.5, 0.1),
        flops=90e6,
        flops_interval=around(90e6, 1e6),
        environment_steps=230_400,
        difference=difference,
        difference_interval=None if difference is None else around(difference),
        p=p,
        probability_of_improvement=better,
        verdict=verdict,
    )


STANDINGS = [
    arm("policy", 0.7),
    arm("none", 0.5, "policy better", 0.2, 0.0004, 0.96),
    arm("static_equal_flops", 0.7, str(Verdict.OPEN), -0.001, 0.8, 0.5),
    arm("sequence", 0.75, "sequence better", -0.05, 0.012, 0.3),
]
VERDICTS = {"none": Verdict.ABOVE, "static_equal_flops": Verdict.OPEN, "sequence": Verdict.BELOW}
ARMS = Comparison(Claim.TRAINING, 5, 256, STANDINGS, VERDICTS, {"order": {one.name: 0.5 for one in STANDINGS}})
