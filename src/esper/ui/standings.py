"""A comparison in words, as a table for the terminal, and as a record for machines. Reports use the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.experiments.analysis import FEWEST_SEEDS, Claim, Interval, Verdict
from esper.experiments.comparison import Against, Comparison, Standing
from esper.tasks.suite import Split
from esper.ui.formats import EN_DASH, interval, listed, mega, p_value, percent, score, signed, signed_interval
from esper.ui.output import say

INTERVAL_STYLE = "dim"
_KINDS = {Verdict.ABOVE: "above", Verdict.BELOW: "below", Verdict.OPEN: "other", Verdict.TOO_FEW: "other"}
_STYLES = {Verdict.ABOVE: "green", Verdict.BELOW: "red", Verdict.OPEN: "", Verdict.TOO_FEW: ""}

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
FEW = 2
"""As many controllers are mentioned with their figures; of more, the names."""
_SUBJECTS = {Claim.POLICY: "this policy scores", Claim.TRAINING: "policies trained this way score"}
PLACES: Mapping[Split, str] = {"heldout": "held-out", "transfer": "transfer"}
"""What a sentence calls the instances of a split."""
_Other = tuple[Standing, Against]

RULE = (
    "Verdicts follow from p, which is adjusted for the number of comparisons (Holm); each interval is taken by "
    "itself, so that one without zero in it need not be a difference shown."
)
"""How verdicts come about, in the words of every table."""


def basis(comparison: Comparison) -> str:
    """What the verdicts hold for, what they say nothing of, and the rule that they follow."""
    played = f"{comparison.instances} instances"
    if comparison.claim is Claim.POLICY:
        return (
            f"One training seed on {played}: intervals and verdicts hold for {comparison.claim} on other instances and "
            f"say nothing of other training seeds. {RULE}"
        )
    if comparison.seeds < FEWEST_SEEDS:
        seeds = "training seed is" if comparison.seeds == 1 else "training seeds are"
        return (
            f"{comparison.seeds} {seeds} too few to say anything of {comparison.claim}: {FEWEST_SEEDS} are the least. "
            "Means are of what was trained."
        )
    return (
        f"{comparison.seeds} training seeds on {played}: intervals and verdicts hold for {comparison.claim}, as both "
        f"seeds and instances count as drawn at random. {RULE}"
    )


def verdict_kind(against: Against | None) -> str:
    """The class that marks it: policy for the reference itself, above, below or other."""
    return "policy" if against is None else _KINDS[against.difference.verdict]


def verdict_words(comparison: Comparison, one: Standing) -> str:
    """The verdict by name; empty for the reference."""
    if one.against is None:
        return ""
    match one.against.difference.verdict:
        case Verdict.ABOVE:
            return f"{comparison.reference.name} better"
        case Verdict.BELOW:
            return f"{one.name} better"
        case verdict:
            return str(verdict)


def sentence(comparison: Comparison, one: Standing) -> str:
    """What may be said of the reference and this one."""
    found = [f"found with {one.environment_steps:,} environment steps"] if one.environment_steps is not None else []
    if one.against is None:
        return ": ".join([one.name, *found])
    difference, first = one.against.difference, comparison.reference.name
    parts = [f"{first} less {one.name} {signed(difference.estimate)}"]
    if difference.interval is not None and difference.p is not None:
        parts[0] += f" ({signed_interval(difference.interval)})"
        parts.append(f"p {p_value(difference.p)}")
    parts.append(f"{first} better in {percent(one.against.better)} of pairs")
    return f"{one.name}: {verdict_words(comparison, one)}, {'; '.join([', '.join(parts), *found])}"


def show_comparison(console: Console, comparison: Comparison, title: str | None = None) -> None:
    """Print the table, a sentence for each verdict, and what they hold for."""
    console.print(standings_table(comparison, title))
    for one in comparison.standings:
        if one.against is not None or one.environment_steps is not None:
            say(console, sentence(comparison, one))
    if comparison.others:
        say(console, basis(comparison))


def standings_table(comparison: Comparison, title: str | None = None) -> Table:
    """One row each with the 95% interval below a figure; 80 columns are enough.

    Accuracy is on test data; added are parameters over the host's; MFLOP is what training one network took; then how
    far the reference's mean score is ahead, how often it is better (where there is room), and the adjusted p-value.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="underline",
    )
    costs = any(one.flops is not None for one in comparison.standings)
    table.add_column("", no_wrap=True)
    for name in ("score", "accuracy", "added", *(["MFLOP"] if costs else []), "ahead", *([] if costs else ["better"])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    for one in comparison.standings:
        spent = [_cell(mega, one.flops)] if one.flops is not None else [Text()] if costs else []
        ahead, better, p = _against(one.against)
        table.add_row(
            Text(one.name, "bold" if one.against is None else ""),
            _cell(score, one.score),
            _cell(percent, one.accuracy),
            _cell(added, one.growth),
            *spent,
            ahead,
            *([] if costs else [better]),
            p,
        )
    return table


def _against(against: Against | None) -> tuple[Text, Text, Text]:
    if against is None:
        return Text(), Text(), Text()
    difference, better = against.difference, Text(percent(against.better))
    if difference.interval is None or difference.p is None:
        return Text(signed(difference.estimate)), better, Text()
    ahead = _cell(signed, difference.interval, _STYLES[difference.verdict])
    return ahead, better, Text(p_value(difference.p))


def added(share: float) -> str:
    """Parameters over the host's: ``+12%``."""
    return percent(share) if share < 0 else f"+{percent(share)}"


def _cell(formatted: Callable[[float], str], found: Interval, style: str = "") -> Text:
    bounds = f"{formatted(found.low)}{EN_DASH}{formatted(found.high)}"
    return Text.assemble((formatted(found.estimate), style), "\n", (bounds, INTERVAL_STYLE))


@dataclass(frozen=True)
class Conclusion:
    """Did learning help? A word or two, and the sentence that backs it; it claims no more than the figures do."""

    short: str
    sentence: str


def conclude(comparison: Comparison, place: str = "held-out") -> Conclusion:
    """The policy among the others, on so many ``place`` instances."""
    found: dict[Verdict, list[_Other]] = {verdict: [] for verdict in Verdict}
    for one, against in comparison.others:
        found[against.difference.verdict].append((one, against))
    policy = comparison.reference
    start = f"On {comparison.instances} {place} instances {_SUBJECTS[comparison.claim]} {score(policy.score.estimate)}"
    if found[Verdict.TOO_FEW]:
        return Conclusion("Too few seeds to say", f"{start} with {comparison.seeds} training seeds.")
    start += f" (95% interval {interval(policy.score)})"
    above, below, open_ = found[Verdict.ABOVE], found[Verdict.BELOW], found[Verdict.OPEN]
    if not below and not open_:
        nearest = max(above, key=lambda other: other[0].score.estimate)
        return Conclusion("Yes", f"{start}, above every other controller; the closest is {_with_difference(nearest)}.")
    parts: list[str] = []
    if above:
        parts.append(f"above {listed([other.name for other, _ in above])}")
    if open_:
        parts.append(f"no difference shown to {_named(open_)}")
    if below:
        parts.append(f"below {_named(below)}")
    short = "In part" if above else "No" if below else "Not shown"
    idle = " It keeps no seed at all." if policy.growth.high == 0 else ""
    return Conclusion(short, f"{start}: {'; '.join(parts)}.{idle}")


def _named(others: list[_Other]) -> str:
    """All by name; a few with their differences too."""
    if len(others) > FEW:
        return listed([other.name for other, _ in others])
    return listed([_with_difference(other) for other in others])


def _with_difference(other: _Other) -> str:
    difference = other[1].difference
    bounds = "" if difference.interval is None else f", {signed_interval(difference.interval)}"
    return f"{other[0].name} (difference {signed(difference.estimate)}{bounds})"


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """All figures and verdicts, for JSON; what compares is null for the reference itself."""
    return {
        "claim": str(comparison.claim),
        "basis": basis(comparison),
        "seeds": comparison.seeds,
        "instances": comparison.instances,
        "reference": comparison.reference.name,
        "standings": [_record(comparison, one) for one in comparison.standings],
    }


def evaluation_record(comparisons: Mapping[Split, Comparison]) -> dict[str, Any]:
    """By split, all figures and the answer, for JSON."""
    return {
        split: {"place": PLACES[split], **comparison_record(found), "answer": conclude(found, PLACES[split]).short}
        for split, found in comparisons.items()
    }


def _record(comparison: Comparison, one: Standing) -> dict[str, Any]:
    against = one.against
    difference = against and against.difference
    return {
        "name": one.name,
        **_figure("score", one.score),
        "interquartile_mean": one.middle,
        "by_seed": list(one.by_seed),
        **_figure("accuracy", one.accuracy),
        **_figure("added", one.growth),
        **_figure("flops", one.flops),
        "environment_steps": one.environment_steps,
        "difference": difference and difference.estimate,
        "difference_interval": _bounds(difference and difference.interval),
        "p": difference and difference.p,
        "probability_of_improvement": against and against.better,
        "verdict": verdict_words(comparison, one) or None,
    }


def _figure(name: str, found: Interval | None) -> dict[str, Any]:
    return {name: found and found.estimate, f"{name}_interval": _bounds(found)}


def _bounds(found: Interval | None) -> list[float] | None:
    return found and [found.low, found.high]
