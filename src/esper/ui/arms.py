"""A learned policy and the arms it was compared with, in words and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from esper.experiments.arms.standings import BETTER, OPEN, TOO_FEW, Standing
from esper.experiments.statistics import Interval
from esper.ui.formats import EN_DASH, mega, p_value, percent, score, signed, signed_interval

INTERVAL_STYLE = "dim"
_OTHER_BETTER = "below"
_KINDS = {BETTER: "above", OPEN: "other", TOO_FEW: "other"}
_STYLES = {"above": "green", _OTHER_BETTER: "red"}

ABOUT = {
    "policy": "the learned controller",
    "none": "the host, never grown",
    "random": "every choice drawn from what is legal",
    "all_at_start": "a seed in every slot from the start",
    "schedule": "the best fixed schedule that a search over the suite found",
    "periodic": "a seed every few decisions, kept if it earns its rent; tuned",
    "heuristic": "a hand-written rule that looks at what seeds earn and cost; tuned",
    "shuffled": "the policy's own actions, each instance's played on another one",
    "sequence": "the best fixed sequence found with the environment steps that the policy's training took",
    "static": "the policy's final network from scratch, its seeds in place from the first step; the same minibatches",
    "static_equal_flops": "the same network, for as many training FLOPs as the policy's took",
    "none_equal_flops": "the host, never grown, for as many training FLOPs as the policy's network took",
}
"""What each arm is."""


def verdict_kind(verdict: str) -> str:
    """The class that marks a verdict: above, below or other."""
    return _KINDS.get(verdict, _OTHER_BETTER)


def arms_table(standings: Sequence[Standing]) -> Table:
    """A row per arm with the 95% interval below each figure; 80 columns are enough.

    Accuracy is on test data; added are parameters over the host's; MFLOP is what training one network took; then how
    far the policy's mean score is ahead, and the adjusted p-value of that.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="underline")
    table.add_column("arm", no_wrap=True)
    for name in ("score", "accuracy", "added", "MFLOP", "policy ahead", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in standings:
        against = one.against
        ahead, p = Text(), Text()
        if against is not None:
            style = _STYLES.get(verdict_kind(against.verdict), "")
            ahead, p = _cell(signed, against.difference, style), Text(p_value(against.p))
        table.add_row(
            Text(one.arm, "bold" if against is None else ""),
            _cell(score, one.score),
            _cell(percent, one.accuracy),
            _cell(percent, one.growth),
            _cell(mega, one.flops),
            ahead,
            p,
        )
    return table


def sentence(one: Standing) -> str:
    """What may be said of the policy and this arm."""
    steps = f"found with {one.environment_steps:,} environment steps"
    if one.against is None:
        return f"{one.arm}: {steps}"
    against = one.against
    return (
        f"{one.arm}: {against.verdict}, policy less {one.arm} {signed(against.difference.estimate)} "
        f"({signed_interval(against.difference)}), p {p_value(against.p)}, "
        f"policy better in {percent(against.probability_of_improvement)} of pairs; {steps}"
    )


def arms_json(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """A record per arm; what compares is null for the policy itself."""
    return [_record(one) for one in standings]


def _record(one: Standing) -> dict[str, Any]:
    against = one.against
    return {
        "name": one.arm,
        "score": one.score.estimate,
        "accuracy": one.accuracy.estimate,
        "added": one.growth.estimate,
        "flops": one.flops.estimate,
        "difference": against and against.difference.estimate,
        "interval": against and [against.difference.low, against.difference.high],
        "p": against and against.p,
        "probability_of_improvement": against and against.probability_of_improvement,
        "verdict": against and against.verdict,
        "environment_steps": one.environment_steps,
    }


def _cell(formatted: Callable[[float], str], found: Interval, style: str = "") -> Text:
    bounds = f"{formatted(found.low)}{EN_DASH}{formatted(found.high)}"
    return Text.assemble((formatted(found.estimate), style), "\n", (bounds, INTERVAL_STYLE))
