"""Did learning help? An answer in one sentence that claims no more than the figures do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from esper.experiments.analysis import Claim, Verdict
from esper.experiments.comparison import Against, Comparison, Standing
from esper.tasks.suite import Split
from esper.ui.formats import interval, listed, score, signed, signed_interval
from esper.ui.standings import comparison_record

FEW = 2
"""As many controllers are mentioned with their figures; of more, the names."""
_SUBJECTS = {Claim.POLICY: "this policy scores", Claim.TRAINING: "policies trained this way score"}
PLACES: Mapping[Split, str] = {"heldout": "held-out", "transfer": "transfer"}
"""What a sentence calls the instances of a split."""
_Other = tuple[Standing, Against]


@dataclass(frozen=True)
class Answer:
    """A word or two, and the sentence that backs it."""

    short: str
    sentence: str


def answer(comparison: Comparison, place: str = "held-out") -> Answer:
    """The policy among the others, on so many ``place`` instances."""
    found: dict[Verdict, list[_Other]] = {verdict: [] for verdict in Verdict}
    for one, against in comparison.others:
        found[against.difference.verdict].append((one, against))
    policy = comparison.reference
    start = f"On {comparison.instances} {place} instances {_SUBJECTS[comparison.claim]} {score(policy.score.estimate)}"
    if found[Verdict.TOO_FEW]:
        return Answer("Too few seeds to say", f"{start} with {comparison.seeds} training seeds.")
    start += f" (95% interval {interval(policy.score)})"
    above, below, open_ = found[Verdict.ABOVE], found[Verdict.BELOW], found[Verdict.OPEN]
    if not below and not open_:
        nearest = max(above, key=lambda other: other[0].score.estimate)
        return Answer("Yes", f"{start}, above every other controller; the closest is {_with_difference(nearest)}.")
    parts: list[str] = []
    if above:
        parts.append(f"above {listed([other.name for other, _ in above])}")
    if open_:
        parts.append(f"no difference shown to {_named(open_)}")
    if below:
        parts.append(f"below {_named(below)}")
    short = "In part" if above else "No" if below else "Not shown"
    idle = " It keeps no seed at all." if policy.growth.high == 0 else ""
    return Answer(short, f"{start}: {'; '.join(parts)}.{idle}")


def evaluation_record(comparisons: Mapping[Split, Comparison]) -> dict[str, Any]:
    """By split, all figures and the answer, for JSON."""
    return {
        split: {"place": PLACES[split], **comparison_record(found), "answer": answer(found, PLACES[split]).short}
        for split, found in comparisons.items()
    }


def _named(others: list[_Other]) -> str:
    """All by name; a few with their differences too."""
    if len(others) > FEW:
        return listed([other.name for other, _ in others])
    return listed([_with_difference(other) for other in others])


def _with_difference(other: _Other) -> str:
    difference = other[1].difference
    bounds = "" if difference.interval is None else f", {signed_interval(difference.interval)}"
    return f"{other[0].name} (difference {signed(difference.estimate)}{bounds})"
