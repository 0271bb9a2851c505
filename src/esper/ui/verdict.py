"""Did learning help? An answer in one sentence that claims no more than the figures do."""

from __future__ import annotations

from dataclasses import dataclass

from esper.experiments.comparison import Comparison, Standing, Verdict
from esper.ui.formats import interval, listed, score, signed, signed_interval

FEW = 2
"""As many controllers are mentioned with their figures; of more, the names."""


@dataclass(frozen=True)
class Answer:
    """A word or two, and the sentence that backs it."""

    short: str
    sentence: str


def answer(comparison: Comparison, place: str = "held-out") -> Answer:
    """The policy among the others, on so many ``place`` instances."""
    found: dict[Verdict, list[Standing]] = {verdict: [] for verdict in Verdict}
    for other in comparison.others:
        if other.against is not None:
            found[other.against.verdict].append(other)
    policy = comparison.policy
    start = (
        f"On {comparison.instances} {place} instances the learned policy scores {score(policy.score.estimate)} "
        f"(95% interval {interval(policy.score)})"
    )
    above, below, open_ = found[Verdict.ABOVE], found[Verdict.BELOW], found[Verdict.OPEN]
    if not below and not open_:
        nearest = max(above, key=lambda other: other.score.estimate)
        return Answer("Yes", f"{start}, above every other controller; the closest is {_with_difference(nearest)}.")
    parts: list[str] = []
    if above:
        parts.append(f"above {listed([other.controller for other in above])}")
    if open_:
        parts.append(f"not told apart from {_named(open_)}")
    if below:
        parts.append(f"below {_named(below)}")
    short = "In part" if above else "No" if below else "Not shown"
    idle = " It keeps no seed at all." if policy.growth.high == 0 else ""
    return Answer(short, f"{start}: {'; '.join(parts)}.{idle}")


def _named(others: list[Standing]) -> str:
    """All by name; a few with their differences too."""
    if len(others) > FEW:
        return listed([other.controller for other in others])
    return listed([_with_difference(other) for other in others])


def _with_difference(other: Standing) -> str:
    if other.against is None:
        return other.controller
    difference = other.against.difference
    return f"{other.controller} (difference {signed(difference.estimate)}, {signed_interval(difference)})"
