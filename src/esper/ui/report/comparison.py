"""How the policy compares with the other controllers on instances that nobody trained on."""

from __future__ import annotations

from collections.abc import Sequence

from esper.experiments.analysis import Interval
from esper.experiments.comparison import Comparison
from esper.ui.figures.record import Source
from esper.ui.formats import interval, score, signed, signed_interval
from esper.ui.report.axes import Axis, axis_for
from esper.ui.report.layout import figure, section, table, upright
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, text, vertical
from esper.ui.report.scatter import MOST_TICKS, Mark, accuracy_against_growth
from esper.ui.report.standings import standings_figure
from esper.ui.standings import verdict_kind

ROW_HEIGHT = 30
NAME_ROOM = 92
NUMBER_ROOM = 56


def comparison_section(title: str, comparison: Comparison, instances: str, source: Source) -> Element:
    """Scores, paired differences, parameters and families; ``instances`` says which they are."""
    count = comparison.instances
    scores = figure(
        _scores(comparison),
        f"Mean score on {count} {instances}, all controllers on the same ones, with 95% intervals. "
        "Score is test accuracy minus the rent on added parameters.",
        source=source,
    )
    differences = figure(
        _differences(comparison),
        "Mean score of the policy minus that of each other controller, paired by instance, with 95% intervals. "
        "Coloured are those that the table below calls better or worse.",
        source=source,
    )
    growth = figure(
        _accuracy_against_growth(comparison),
        "Mean test accuracy against mean parameters added, as a share of the host's, with 95% intervals. "
        "Up and to the left is better.",
        source=source,
    )
    families = figure(
        _families(comparison),
        "Mean score by family of instances; the best controller of each family is set in bold.",
        source=source,
    )
    return section(
        title,
        element("div", scores, differences, class_="pair"),
        standings_figure(comparison, source),
        element("div", growth, families, class_="pair"),
    )


def _rows(names: Sequence[str], kinds: Sequence[str], intervals: Sequence[Interval], plot: Plot, zero: bool) -> Element:
    marks: list[Node] = [vertical(plot.across(tick), 0, plot.height, "grid") for tick in plot.x.ticks]
    if zero:
        marks.append(vertical(plot.across(0), 0, plot.height, "zero"))
    for row, (name, kind, found) in enumerate(zip(names, kinds, intervals, strict=True)):
        place = row + 0.5
        words = signed(found.estimate) if zero else score(found.estimate)
        hover = f"{name}: {words}, 95% interval {signed_interval(found) if zero else interval(found)}"
        marks.append(plot.whisker_across(found, place, kind))
        marks.append(plot.dot(found.estimate, place, kind, hover))
        marks.append(text("-10", plot.down(place) + 4, name, f"label end {kind}"))
        marks.append(element("svg", text("10", plot.down(place) + 4, words, f"label start {kind}"), x="100%"))
    return plot.figure(*marks, title="One row per controller", x_title="policy minus other" if zero else "score")


def _row_plot(intervals: Sequence[Interval], *, zero: bool) -> Plot:
    bounds = [bound for found in intervals for bound in (found.low, found.high)] + ([0.0] if zero else [])
    rows = len(intervals)
    # The vertical axis counts rows from the top and has no ticks of its own.
    down = _Rows((float(rows), 0.0))
    return Plot(axis_for(bounds, MOST_TICKS), down, rows * ROW_HEIGHT, left=NAME_ROOM, right=NUMBER_ROOM)


class _Rows(Axis):
    """Rows from the top; their names stand in place of tick labels."""

    def label(self, value: float) -> str:
        return ""


def _scores(comparison: Comparison) -> Element:
    standings = comparison.standings
    intervals, kinds = [one.score for one in standings], [_kind(one.against) for one in standings]
    return _rows([one.name for one in standings], kinds, intervals, _row_plot(intervals, zero=False), zero=False)


def _differences(comparison: Comparison) -> Element:
    known = [(one.name, against, against.difference.interval) for one, against in comparison.others]
    intervals = [found for _, _, found in known if found is not None]
    kinds = [verdict_kind(against) for _, against, found in known if found is not None]
    names = [name for name, _, found in known if found is not None]
    return _rows(names, kinds, intervals, _row_plot(intervals, zero=True), zero=True)


def _accuracy_against_growth(comparison: Comparison) -> Element:
    marks = [Mark(one.name, _kind(one.against), one.growth, one.accuracy) for one in comparison.standings]
    return accuracy_against_growth(marks, NAME_ROOM)


def _kind(against: object | None) -> str:
    return "policy" if against is None else "other"


def _families(comparison: Comparison) -> Element:
    names = [one.name for one in comparison.standings]
    rows: list[list[Node]] = []
    for family, means in comparison.family_scores.items():
        best = max(means.values())
        cells = [element("b" if means[name] == best else "span", score(means[name])) for name in names]
        rows.append([element("th", family, scope="row"), *cells])
    return table(["family", *map(upright, names)], rows, "numbers dense")
