"""How the policy compares with the other controllers on instances that nobody trained on."""

from __future__ import annotations

from collections.abc import Sequence

from esper.experiments.comparison import Against, Comparison, Standing, Verdict
from esper.experiments.statistics import Interval
from esper.ui.figures.record import Source
from esper.ui.formats import interval, p_value, percent, score, signed, signed_interval
from esper.ui.report.axes import Axis, axis_for
from esper.ui.report.layout import figure, section, table, upright
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, text, vertical
from esper.ui.report.scatter import MOST_TICKS, Mark, accuracy_against_growth

ROW_HEIGHT = 30
NAME_ROOM = 92
NUMBER_ROOM = 56


def comparison_section(title: str, comparison: Comparison, instances: str, source: Source) -> Element:
    """Scores, paired differences, parameters and families; ``instances`` says which they are."""
    count = comparison.instances
    scores = figure(
        _scores(comparison),
        f"Mean score on {count} {instances}, all controllers on the same ones, with 95% bootstrap intervals. "
        "Score is test accuracy minus the rent on added parameters.",
        source=source,
    )
    differences = figure(
        _differences(comparison),
        "Mean score of the policy minus that of each other controller, paired by instance, with 95% intervals. "
        "An interval that holds zero shows no difference.",
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
        figure(_numbers(comparison), _NUMBERS_CAPTION, source=source),
        element("div", growth, families, class_="pair"),
    )


_NUMBERS_CAPTION = (
    "The same in figures, with 95% intervals in brackets. Policy better: the share of instances on which the policy "
    "scores higher, ties counting half. p: permutation test of the mean difference, adjusted for the number of "
    "controllers (Holm)."
)


def _kind(standing: Standing) -> str:
    return "policy" if standing.against is None else "other"


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
    intervals = [one.score for one in standings]
    plot = _row_plot(intervals, zero=False)
    return _rows([one.controller for one in standings], [_kind(one) for one in standings], intervals, plot, zero=False)


def _differences(comparison: Comparison) -> Element:
    paired = [(one.controller, one.against) for one in comparison.standings if one.against is not None]
    intervals = [against.difference for _, against in paired]
    kinds = [_verdict_kind(against) for _, against in paired]
    return _rows([name for name, _ in paired], kinds, intervals, _row_plot(intervals, zero=True), zero=True)


def _verdict_kind(against: Against) -> str:
    return {Verdict.ABOVE: "above", Verdict.BELOW: "below", Verdict.OPEN: "other"}[against.verdict]


def _numbers(comparison: Comparison) -> Element:
    head = ["controller", "score", "middle half", "test accuracy", "parameters added", "policy minus it"]
    rows = [_number_row(one) for one in comparison.standings]
    return table([*head, "policy better", "p"], rows, "numbers")


def _number_row(one: Standing) -> list[Node]:
    row: list[Node] = [
        element("th", one.controller, scope="row", class_=_kind(one)),
        _figure_cell(score(one.score.estimate), interval(one.score)),
        _figure_cell(score(one.middle.estimate), interval(one.middle)),
        _figure_cell(percent(one.accuracy.estimate), _percents(one.accuracy)),
        _figure_cell(f"+{percent(one.growth.estimate)}", _percents(one.growth)),
    ]
    if one.against is None:
        return [*row, "", "", ""]
    difference, improvement = one.against.difference, one.against.improvement
    return [
        *row,
        _figure_cell(signed(difference.estimate), signed_interval(difference), _verdict_kind(one.against)),
        _figure_cell(percent(improvement.estimate), _percents(improvement)),
        p_value(one.against.p),
    ]


def _figure_cell(estimate: str, bounds: str, kind: str = "") -> Element:
    return element("td", element("b", estimate, class_=kind), " ", element("small", f"[{bounds}]"))


def _percents(found: Interval) -> str:
    return f"{percent(found.low)} to {percent(found.high)}"


def _accuracy_against_growth(comparison: Comparison) -> Element:
    marks = [Mark(one.controller, _kind(one), one.growth, one.accuracy) for one in comparison.standings]
    return accuracy_against_growth(marks, NAME_ROOM)


def _families(comparison: Comparison) -> Element:
    names = [one.controller for one in comparison.standings]
    rows: list[list[Node]] = []
    for family, means in comparison.family_scores.items():
        best = max(means.values())
        cells = [element("b" if means[name] == best else "span", score(means[name])) for name in names]
        rows.append([element("th", family, scope="row"), *cells])
    return table(["family", *map(upright, names)], rows, "numbers dense")
