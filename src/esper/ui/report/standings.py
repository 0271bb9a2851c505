"""The table of a comparison: who scores how much, by how much the reference is ahead, and the verdict."""

from __future__ import annotations

from collections.abc import Callable

from esper.experiments.analysis import Interval
from esper.experiments.comparison import Comparison, Standing
from esper.ui.figures.record import Source
from esper.ui.formats import mega, p_value, percent, score, signed
from esper.ui.report.layout import figure, table
from esper.ui.report.markup import Element, Node, element
from esper.ui.standings import added, basis, verdict_kind, verdict_words

METHOD = "Ahead: mean score of {reference} less that of the other. p: seeds and instances crossed, both at random."
_COLUMNS = (
    "Means with 95% intervals in brackets. Score is test accuracy minus the rent on added parameters; middle half: "
    "interquartile mean of the score; added are parameters over the host's. Better: how often {reference} scores "
    "higher on an instance, ties counting half; it describes, and judges nothing. "
)
_COSTS = "MFLOP is what training one network took, without measurements. "
_STEPS = "Environment steps are what finding it took. "


def standings_figure(comparison: Comparison, source: Source) -> Element:
    """The table, what its columns are, and what its verdicts hold for."""
    costs = any(one.flops is not None for one in comparison.standings)
    steps = any(one.environment_steps is not None for one in comparison.standings)
    head = ["", "score", "middle half", "test accuracy", "added", *(["MFLOP"] if costs else [])]
    head += ["ahead", "better", "p", "verdict", *(["environment steps"] if steps else [])]
    rows = [_row(comparison, one, costs=costs, steps=steps) for one in comparison.standings]
    columns = f"{_COLUMNS}{_COSTS if costs else ''}{_STEPS if steps else ''}{METHOD}"
    caption = f"{columns.format(reference=comparison.reference.name)} {basis(comparison)}"
    return figure(table(head, rows, "numbers dense"), caption, source=source)


def _row(comparison: Comparison, one: Standing, *, costs: bool, steps: bool) -> list[Node]:
    kind = verdict_kind(one.against)
    row: list[Node] = [
        element("th", one.name, scope="row", class_=kind if one.against is None else ""),
        _cell(score, one.score),
        score(one.middle),
        _cell(percent, one.accuracy),
        _cell(added, one.growth),
    ]
    if costs:
        row.append(_cell(mega, one.flops) if one.flops is not None else "")
    row += _compared(comparison, one, kind)
    if steps:
        row.append("" if one.environment_steps is None else f"{one.environment_steps:,}")
    return row


def _compared(comparison: Comparison, one: Standing, kind: str) -> list[Node]:
    if one.against is None:
        return ["", "", "", ""]
    difference = one.against.difference
    return [
        _cell(signed, difference.interval) if difference.interval is not None else signed(difference.estimate),
        percent(one.against.better),
        "" if difference.p is None else p_value(difference.p),
        element("b", verdict_words(comparison, one), class_=kind),
    ]


def _cell(formatted: Callable[[float], str], found: Interval) -> Element:
    bounds = f"[{formatted(found.low)} to {formatted(found.high)}]"
    return element("td", element("b", formatted(found.estimate)), " ", element("small", bounds))
