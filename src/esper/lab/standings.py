"""Results of comparisons: in words, as a table, and as JSON."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.control.learned import SAMPLED, UNTRAINED
from esper.control.rules import SHUFFLED
from esper.dash.formats import EN_DASH, count, join_words, mega, p_value, percent, score, signed_percent, signed_score
from esper.dash.output import print_line
from esper.errors import plural
from esper.lab.analysis import FEWEST_SEEDS, Claim, Comparison, Verdict
from esper.lab.exhibit import Column, Row, Value
from esper.tasks.suite import Split
from esper.train.results import ArmRecord, Bounds, ComparisonRecord, EvaluationRecord

SPLIT_NAMES: Mapping[Split, str] = {"heldout": "held-out", "transfer": "transfer"}
"""Names of the instances of a split in sentences."""
SPLIT_TITLES: Mapping[Split, str] = {
    "heldout": "held-out instances",
    "transfer": "instances of families never trained on",
}
"""Names of the instances of a split in titles."""

ARM_MEANINGS = {
    "policy": "the learned controller",
    "untrained": "the same policy with its first weights, as before training",
    "sampled": "the learned controller, drawing its choices instead of taking the likeliest",
    "none": "the host, never grown",
    "random": "random legal actions",
    "all_at_start": "a seed in every slot from the start",
    "schedule": "the best fixed schedule found by a search over the suite",
    "periodic": "a seed every few decisions, kept if its contribution exceeds its rent; tuned",
    "heuristic": "a hand-written rule on contributions and costs of seeds; tuned",
    "look": "plants the candidate with the highest promise, keeps it if its contribution exceeds its rent",
    "shuffled": "the policy's own actions, each instance's applied to another one",
    "sequence": "the best fixed sequence found with the environment steps of the policy's training",
    "static": "the policy's final network trained from scratch, with its seeds from the first step; same minibatches",
    "static_equal_flops": "the same network, trained with the same FLOPs as the policy's network",
    "none_equal_flops": "the host without growth, trained with the same FLOPs as the policy's network",
}
RULE = (
    "Verdicts use p, adjusted for the number of comparisons (Holm). Intervals are not adjusted, so an interval without "
    "zero need not mean a difference shown."
)

_STYLES = {"policy": "bold", "above": "green", "below": "red"}
"""Styles on the terminal, by the mark of a cell."""
_NARROW = ("name", "score", "accuracy", "added", "flops", "difference", "probability_of_improvement", "p")
"""Columns that fit into 80 characters."""
NO_BREAK_SPACE = "\u00a0"
HEADING_WIDTH = 13
"""Characters of a heading on the terminal, as of an interval."""
_OF_POLICY = (UNTRAINED, SAMPLED, SHUFFLED)
"""Arms that are ways to play the policy itself, and not other controllers that one could use instead."""
_RELATIONS = {Verdict.ABOVE: "above", Verdict.BELOW: "below", Verdict.OPEN: "not shown to differ from"}


def format_interval(interval: Bounds, write: Callable[[float], str] = score) -> str:
    """Both ends of an interval: ``0.642 to 0.668``."""
    low, high = interval
    return f"{write(low)} to {write(high)}"


def name_instances(count: int, split: Split = "heldout") -> str:
    """The number of instances of a split as a phrase."""
    return plural(count, SPLIT_TITLES[split].replace("instances", "instance"), SPLIT_TITLES[split])


# In words


def describe_basis(comparison: Comparison) -> str:
    """What the verdicts apply to, what they do not cover, and their rule."""
    played, claim = plural(comparison.instances, "instance"), comparison.claim
    if claim is Claim.CONTROLLER:
        return f"On {played}: intervals and verdicts hold for {claim} on other instances. {RULE}"
    if claim is Claim.POLICY:
        return (
            f"One training seed on {played}: intervals and verdicts hold for {claim} on other instances, not for "
            f"other training seeds. {RULE}"
        )
    if comparison.seeds < FEWEST_SEEDS:
        seeds = "training seed is" if comparison.seeds == 1 else "training seeds are"
        return (
            f"{comparison.seeds} {seeds} too few for {claim}, which needs {FEWEST_SEEDS}. "
            "Means are over the trained policies."
        )
    return (
        f"{plural(comparison.seeds, 'training seed')} on {played}: intervals and verdicts hold for {claim}, since "
        f"both seeds and instances are treated as random. {RULE}"
    )


def describe_arm(comparison: Comparison, arm: ArmRecord) -> str:
    """The reference against this arm in a sentence, with the cost of finding the arm."""
    steps = arm.environment_steps
    cost = [] if steps is None else [f"found with {plural(steps, 'environment step')}"]
    first = comparison.reference.name
    if arm.difference is None or arm.probability_of_improvement is None:
        return ": ".join([arm.name, *cost])
    figures = f"{first} minus {arm.name} {signed_score(arm.difference)}"
    if arm.difference_interval is not None and arm.p is not None:
        figures += f" ({format_interval(arm.difference_interval, signed_score)}), p {p_value(arm.p)}"
    figures += f", {first} better in {percent(arm.probability_of_improvement)} of pairs"
    return f"{arm.name}: {arm.verdict}, {'; '.join([figures, *cost])}"


class Conclusion(NamedTuple):
    """Whether learning helped, in a few words, and a sentence that supports it."""

    short: str
    sentence: str


def assess_learning(comparison: Comparison, split: Split = "heldout") -> Conclusion:
    """Whether learning helped, by the policy compared with its untrained self and with the best other controller.

    *Yes* requires that the policy is above both. A policy that is only above its untrained self has learned, but there
    is a rule that does as well.
    """

    def relate(name: str, shown: str) -> str:
        arm = next(arm for arm in comparison.others if arm.name == name)
        interval = arm.difference_interval
        bounds = "" if interval is None else f", {format_interval(interval, signed_score)}"
        relation = _RELATIONS[comparison.verdicts[name]]
        return f"{relation} {shown} (difference {signed_score(arm.difference or 0.0)}{bounds})"

    policy, verdicts = comparison.reference, comparison.verdicts
    subject = {
        Claim.POLICY: "this policy scores",
        Claim.CONTROLLER: "this controller scores",
        Claim.TRAINING: "policies trained this way score",
    }[comparison.claim]
    start = f"On {plural(comparison.instances, f'{SPLIT_NAMES[split]} instance')} {subject} {score(policy.score)}"
    if Verdict.TOO_FEW in verdicts.values():
        return Conclusion("Too few seeds to say", f"{start} with {plural(comparison.seeds, 'training seed')}.")

    # The sentence: the untrained self and the best other controller with figures, the rest by name.
    best = max((arm for arm in comparison.others if arm.name not in _OF_POLICY), key=lambda arm: arm.score)
    parts = [relate(UNTRAINED, "its untrained self")] if UNTRAINED in verdicts else []
    parts.append(relate(best.name, f"the best other controller, {best.name}"))
    for verdict in (Verdict.OPEN, Verdict.BELOW):
        names = [arm.name for arm in comparison.others if verdicts[arm.name] is verdict]
        if rest := [name for name in names if name not in (UNTRAINED, SAMPLED, best.name)]:
            parts.append(f"{_RELATIONS[verdict]} {join_words(rest)}")
    sentence = f"{start} (95% interval {format_interval(policy.score_interval)}): {'; '.join(parts)}."
    if verdicts.get(SAMPLED) in (Verdict.ABOVE, Verdict.BELOW):
        better = "greedily" if verdicts[SAMPLED] is Verdict.ABOVE else "by drawing its choices"
        sentence += f" It plays better {better}: greedy play is {relate(SAMPLED, 'sampled play')}."
    if policy.added_interval[1] == 0:
        sentence += " It keeps no seed at all."

    if comparison.claim is Claim.CONTROLLER:
        return Conclusion(f"{_RELATIONS[verdicts[best.name]].capitalize()} the best other controller", sentence)
    if UNTRAINED not in verdicts:
        return Conclusion("Not known, since its untrained self did not play", sentence)
    if verdicts[UNTRAINED] is not Verdict.ABOVE:
        return Conclusion("No", sentence)
    if verdicts[best.name] is Verdict.ABOVE:
        return Conclusion("Yes", sentence)
    level = "better" if verdicts[best.name] is Verdict.BELOW else "as good"
    return Conclusion(f"It learned, but {best.name} is {level}: use that", sentence)


# For machines


def record_evaluation(comparisons: Mapping[Split, Comparison]) -> dict[str, Any]:
    """All figures and the answer for each split, for JSON."""
    return {
        split: asdict(
            EvaluationRecord(
                **vars(record_comparison(comparison)),
                place=SPLIT_NAMES[split],
                answer=assess_learning(comparison, split).short,
            )
        )
        for split, comparison in comparisons.items()
    }


def record_comparison(comparison: Comparison) -> ComparisonRecord:
    """All figures and verdicts."""
    return ComparisonRecord(
        claim=str(comparison.claim),
        basis=describe_basis(comparison),
        seeds=comparison.seeds,
        instances=comparison.instances,
        reference=comparison.reference.name,
        standings=comparison.standings,
    )


# As a table


def standings_rows(comparison: Comparison) -> list[Row]:
    """The standings as rows with a ``kind``: ``policy`` for the reference, ``above``, ``below`` or ``other``."""
    rows: list[Row] = []
    for arm in comparison.standings:
        verdict = comparison.verdicts.get(arm.name)
        kind = str(verdict) if verdict in (Verdict.ABOVE, Verdict.BELOW) else "other" if verdict else "policy"
        row: dict[str, Value] = {"name": arm.name, "kind": kind}
        # Every figure of the record is a column, the ends of its interval two, except the figures by seed.
        for name, value in vars(arm).items():
            if name.endswith("_interval"):
                stem = name.removesuffix("_interval")
                row[f"{stem}_low"], row[f"{stem}_high"] = value or (None, None)
            elif name != "by_seed":
                row[name] = value
        rows.append(row)
    return rows


def standings_columns(comparison: Comparison) -> tuple[Column, ...]:
    """The columns of the standings: figures of the arm, then those of the reference against it."""
    arms, reference = comparison.standings, comparison.reference.name
    flops = Column("flops", mega, "MFLOP", bounded=True, missing="")
    steps = Column("environment_steps", count, missing="")
    return (
        Column("name", title="", mark=lambda row: "policy" if row["verdict"] is None else ""),
        Column("score", score, bounded=True),
        Column("interquartile_mean", score, "middle half"),
        Column("accuracy", percent, bounded=True),
        Column("added", signed_percent, bounded=True),
        *([flops] if any(arm.flops is not None for arm in arms) else []),
        Column(
            "difference",
            signed_score,
            f"{reference} minus{NO_BREAK_SPACE}it",
            bounded=True,
            missing="",
            mark=lambda row: str(row["kind"]) if row["kind"] in ("above", "below") else "",
        ),
        Column("probability_of_improvement", percent, f"{reference} wins", missing=""),
        Column("p", p_value, missing=""),
        Column("verdict", missing="", mark=lambda row: "" if row["verdict"] is None else str(row["kind"])),
        *([steps] if any(arm.environment_steps is not None for arm in arms) else []),
    )


def standings_table(comparison: Comparison, title: str | None = None) -> Table:
    """A table for a terminal of 80 columns, with the 95% interval below a figure."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), header_style="underline"
    )
    # Only columns that fit; FLOPs replace the probability of improvement.
    columns = [column for column in standings_columns(comparison) if column.name in _NARROW]
    if any(column.name == "flops" for column in columns):
        columns = [column for column in columns if column.name != "probability_of_improvement"]
    for column in columns:
        # One line per word, or several of a long word, so that no heading is wider than its figures.
        lines = [line for word in column.heading.split(" ") for line in textwrap.wrap(word, HEADING_WIDTH)]
        table.add_column("\n".join(lines), justify="right" if column.write_number else "left", no_wrap=True)
    for row in standings_rows(comparison):
        texts: list[Text] = []
        for column in columns:
            cell = column.cell(row)
            below = f"\n{EN_DASH.join(cell.bounds)}" if cell.bounds else ""
            texts.append(Text.assemble((cell.text, _STYLES.get(cell.mark, "")), (below, "dim")))
        table.add_row(*texts)
    return table


def show_comparison(console: Console, comparison: Comparison, title: str | None = None) -> None:
    """Print the table, a sentence for each verdict, and what the verdicts apply to."""
    console.print(standings_table(comparison, title))
    for arm in comparison.standings:
        if arm.difference is not None or arm.environment_steps is not None:
            print_line(console, describe_arm(comparison, arm))
    if comparison.others:
        print_line(console, describe_basis(comparison))
