"""Who is better, in words, as one table for terminal, page and paper, and as a record for machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.dash.formats import (
    EN_DASH,
    count,
    join_words,
    mega,
    p_value,
    percent,
    score,
    signed_percent,
    signed_score,
)
from esper.dash.output import print_line
from esper.lab.analysis import FEWEST_SEEDS, Claim, Interval, Verdict
from esper.lab.comparison import ArmSummary, Comparison, ReferenceDifference
from esper.lab.figures.exhibit import Column, Row, Rows, Value
from esper.tasks.suite import Split
from esper.train.results import ArmRecord, ComparisonRecord, EvaluationRecord

SPLIT_NAMES: Mapping[Split, str] = {"heldout": "held-out", "transfer": "transfer"}
"""What a sentence calls the instances of a split."""
SPLIT_TITLES: Mapping[Split, str] = {
    "heldout": "held-out instances",
    "transfer": "instances of families never trained on",
}
ABOUT = {
    "policy": "the learned controller",
    "none": "the host, never grown",
    "random": "every choice drawn from what is legal",
    "all_at_start": "a seed in every slot from the start",
    "schedule": "the best fixed schedule that a search over the suite found",
    "periodic": "a seed every few decisions, kept if it earns its rent; tuned",
    "heuristic": "a hand-written rule that looks at what seeds earn and cost; tuned",
    "look": "plants what promises most by the network's own gradients, keeps it if it earns its rent",
    "shuffled": "the policy's own actions, each instance's played on another one",
    "sequence": "the best fixed sequence found with the environment steps that the policy's training took",
    "static": "the policy's final network from scratch, its seeds in place from the first step; the same minibatches",
    "static_equal_flops": "the same network, for as many training FLOPs as the policy's took",
    "none_equal_flops": "the host, never grown, for as many training FLOPs as the policy's network took",
}
"""What each arm is."""
RULE = (
    "Verdicts follow from p, which is adjusted for the number of comparisons (Holm); each interval is taken by "
    "itself, so that one without zero in it need not be a difference shown."
)
"""How verdicts come about, in the words of every table."""

_STYLES = {"policy": "bold", "above": "green", "below": "red"}
"""Styles on the terminal, by the mark of a cell."""
_NARROW = ("name", "score", "accuracy", "added", "flops", "difference", "probability_of_improvement", "p")
"""Columns for which 80 characters are enough."""
_FEW = 2
"""As many controllers are mentioned with their figures; of more, the names."""
_SUBJECTS = {
    Claim.POLICY: "this policy scores",
    Claim.CONTROLLER: "this controller scores",
    Claim.TRAINING: "policies trained this way score",
}


def format_interval(interval: Interval) -> str:
    """The interval alone: ``0.642 to 0.668``."""
    return f"{score(interval.low)} to {score(interval.high)}"


def format_signed_interval(interval: Interval) -> str:
    """The interval alone, with signs: ``+0.012 to +0.030``."""
    return f"{signed_score(interval.low)} to {signed_score(interval.high)}"


# In words -------------------------------------------------------------------------------------------------------------


def verdict_words(comparison: Comparison, one: ArmSummary) -> str:
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


def describe_basis(comparison: Comparison) -> str:
    """What the verdicts hold for, what they say nothing of, and the rule that they follow."""
    played = f"{comparison.instances} instances"
    if comparison.claim is Claim.CONTROLLER:
        return f"On {played}: intervals and verdicts hold for {comparison.claim} on other instances. {RULE}"
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


def describe_arm(comparison: Comparison, one: ArmSummary) -> str:
    """What may be said of the reference and this one."""
    cost = [f"found with {one.environment_steps:,} environment steps"] if one.environment_steps is not None else []
    if one.against is None:
        return ": ".join([one.name, *cost])
    difference, first = one.against.difference, comparison.reference.name
    parts = [f"{first} less {one.name} {signed_score(difference.estimate)}"]
    if difference.interval is not None and difference.p is not None:
        parts[0] += f" ({format_signed_interval(difference.interval)})"
        parts.append(f"p {p_value(difference.p)}")
    parts.append(f"{first} better in {percent(one.against.better)} of pairs")
    return f"{one.name}: {verdict_words(comparison, one)}, {'; '.join([', '.join(parts), *cost])}"


@dataclass(frozen=True)
class Answer:
    """Did learning help? A word or two, and the sentence that backs it, which claims no more than the figures do."""

    short: str
    sentence: str


def judge_learning(comparison: Comparison, split: Split = "heldout") -> Answer:
    """The policy among the others, on the instances of that split."""
    by_verdict: dict[Verdict, list[tuple[ArmSummary, ReferenceDifference]]] = {verdict: [] for verdict in Verdict}
    for one, against in comparison.others:
        by_verdict[against.difference.verdict].append((one, against))
    policy, played = comparison.reference, f"{comparison.instances} {SPLIT_NAMES[split]} instances"
    start = f"On {played} {_SUBJECTS[comparison.claim]} {score(policy.score.estimate)}"
    if by_verdict[Verdict.TOO_FEW]:
        return Answer("Too few seeds to say", f"{start} with {comparison.seeds} training seeds.")
    start += f" (95% interval {format_interval(policy.score)})"
    above, below, open_ = by_verdict[Verdict.ABOVE], by_verdict[Verdict.BELOW], by_verdict[Verdict.OPEN]
    if not below and not open_:
        nearest = max(above, key=lambda other: other[0].score.estimate)
        return Answer("Yes", f"{start}, above every other controller; the closest is {_with_difference(*nearest)}.")
    parts: list[str] = []
    if above:
        parts.append(f"above {join_words([other.name for other, _ in above])}")
    if open_:
        parts.append(f"no difference shown to {_name_all(open_)}")
    if below:
        parts.append(f"below {_name_all(below)}")
    short = "In part" if above else "No" if below else "Not shown"
    idle = " It keeps no seed at all." if policy.growth.high == 0 else ""
    return Answer(short, f"{start}: {'; '.join(parts)}.{idle}")


def _name_all(others: list[tuple[ArmSummary, ReferenceDifference]]) -> str:
    """All by name; a few with their differences too."""
    few = len(others) <= _FEW
    return join_words([_with_difference(one, against) if few else one.name for one, against in others])


def _with_difference(one: ArmSummary, against: ReferenceDifference) -> str:
    difference = against.difference
    bounds = "" if difference.interval is None else f", {format_signed_interval(difference.interval)}"
    return f"{one.name} (difference {signed_score(difference.estimate)}{bounds})"


# For machines ---------------------------------------------------------------------------------------------------------


def record_evaluation(comparisons: Mapping[Split, Comparison]) -> dict[str, Any]:
    """All figures and the answer for each split, for JSON."""
    return {
        split: asdict(
            EvaluationRecord(
                **vars(record_comparison(comparison)),
                place=SPLIT_NAMES[split],
                answer=judge_learning(comparison, split).short,
            )
        )
        for split, comparison in comparisons.items()
    }


def record_scores(comparison: Comparison) -> dict[str, Any]:
    """Mean scores with their intervals by controller, for JSON."""
    return {
        one.name: {"score": one.score.estimate, "score_interval": _bounds(one.score)} for one in comparison.standings
    }


def record_comparison(comparison: Comparison) -> ComparisonRecord:
    """All figures and verdicts."""
    return ComparisonRecord(
        str(comparison.claim),
        describe_basis(comparison),
        comparison.seeds,
        comparison.instances,
        comparison.reference.name,
        [_record_arm(comparison, one) for one in comparison.standings],
    )


def _record_arm(comparison: Comparison, one: ArmSummary) -> ArmRecord:
    against = one.against
    difference = against and against.difference
    return ArmRecord(
        name=one.name,
        score=one.score.estimate,
        score_interval=_bounds(one.score),
        interquartile_mean=one.middle,
        by_seed=one.by_seed,
        accuracy=one.accuracy.estimate,
        accuracy_interval=_bounds(one.accuracy),
        added=one.growth.estimate,
        added_interval=_bounds(one.growth),
        flops=one.flops and one.flops.estimate,
        flops_interval=one.flops and _bounds(one.flops),
        environment_steps=one.environment_steps,
        difference=difference and difference.estimate,
        difference_interval=_bounds(difference.interval) if difference and difference.interval else None,
        p=difference and difference.p,
        probability_of_improvement=against and against.better,
        verdict=verdict_words(comparison, one) or None,
    )


def _bounds(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


# As a table -----------------------------------------------------------------------------------------------------------


def standings_rows(comparison: Comparison) -> Rows:
    """The record's standings, with the ends of intervals in columns of their own, and what marks the verdict."""
    rows: list[Row] = []
    for one in comparison.standings:
        row: dict[str, Value] = {"name": one.name, "kind": _kind(one.against)}
        for name, value in vars(_record_arm(comparison, one)).items():
            if name.endswith("_interval"):
                stem = name.removesuffix("_interval")
                row[f"{stem}_low"], row[f"{stem}_high"] = value or (None, None)
            elif name != "by_seed":
                row[name] = value
        rows.append(row)
    return Rows.of(rows)


def _kind(against: ReferenceDifference | None) -> str:
    """Policy for the reference itself, above, below or other."""
    if against is None:
        return "policy"
    verdict = against.difference.verdict
    return str(verdict) if verdict in (Verdict.ABOVE, Verdict.BELOW) else "other"


def standings_columns(comparison: Comparison) -> tuple[Column, ...]:
    """Accuracy is on test data; added are parameters over the host's; MFLOP is what training one network took.

    Then how far the reference's mean score is ahead, how often it is better, and the adjusted p-value.
    """
    lines = comparison.standings
    costs = any(one.flops is not None for one in lines)
    steps = any(one.environment_steps is not None for one in lines)
    return (
        Column("name", title="", mark=lambda row: "policy" if row["verdict"] is None else ""),
        Column("score", score, bounded=True),
        Column("interquartile_mean", score, "middle half"),
        Column("accuracy", percent, bounded=True),
        Column("added", signed_percent, bounded=True),
        *([Column("flops", mega, "MFLOP", bounded=True, missing="")] if costs else []),
        Column(
            "difference",
            signed_score,
            "ahead",
            bounded=True,
            missing="",
            mark=lambda row: str(row["kind"]) if row["kind"] in ("above", "below") else "",
        ),
        Column("probability_of_improvement", percent, "better", missing=""),
        Column("p", p_value, missing=""),
        Column("verdict", missing="", mark=lambda row: str(row["kind"]) if row["verdict"] else ""),
        *([Column("environment_steps", count, missing="")] if steps else []),
    )


def standings_table(comparison: Comparison, title: str | None = None) -> Table:
    """For a terminal of 80 columns: one row each, with the 95% interval below a figure."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="underline",
    )
    columns = [one for one in standings_columns(comparison) if one.name in _NARROW]
    if any(one.name == "flops" for one in columns):
        columns = [one for one in columns if one.name != "probability_of_improvement"]
    for column in columns:
        table.add_column(column.heading, justify="right" if column.write_number else "left", no_wrap=True)
    for row in standings_rows(comparison).mappings():
        cells = [column.cell(row) for column in columns]
        table.add_row(
            *(
                Text.assemble(
                    (cell.text, _STYLES.get(cell.mark, "")),
                    (f"\n{EN_DASH.join(cell.bounds)}" if cell.bounds else "", "dim"),
                )
                for cell in cells
            )
        )
    return table


def show_comparison(console: Console, comparison: Comparison, title: str | None = None) -> None:
    """Print the table, a sentence for each verdict, and what they hold for."""
    console.print(standings_table(comparison, title))
    for one in comparison.standings:
        if one.against is not None or one.environment_steps is not None:
            print_line(console, describe_arm(comparison, one))
    if comparison.others:
        print_line(console, describe_basis(comparison))
