"""What the policy tried in training: its operations, the fates of its seeds, what it was paid for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from esper.ui.figures.growing import FIGURES as GROWING
from esper.ui.figures.growing import OUTCOMES, REWARDS, SEEDS
from esper.ui.figures.learning import FIGURES as LEARNING
from esper.ui.figures.learning import OPERATIONS
from esper.ui.figures.record import Query
from esper.ui.figures.rows import Rows
from esper.ui.report.axes import Axis, axis_for, counting_axis
from esper.ui.report.data import ReportData
from esper.ui.report.layout import figure, legend, section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, drawing, percentage, stretched, text

HEIGHT = 160
ROW_HEIGHT = 22
BAR_HEIGHT = 15
NAME_ROOM = 92
NUMBER_ROOM = 40
_Draw = Callable[[Rows], Element]
HUES = 8
"""Colours of the style sheet; they come round again."""
_FIGURES = {one.source: one for one in (*LEARNING, *GROWING)}
_HUE_OF_OUTCOME = dict(zip(OUTCOMES, (0, 4, 6), strict=True))


def tried_section(data: ReportData) -> Element | None:
    """Three figures, those without numbers left out by a sentence; None before the first iteration."""
    if not data.rows[OPERATIONS]:
        return None
    drawn = [
        _figure(data.rows, OPERATIONS, _operations, "operation"),
        _figure(data.rows, SEEDS, _seeds, "outcome"),
        _figure(data.rows, REWARDS, _rewards, "term"),
    ]
    return section("What it tried", element("div", *drawn, class_="pair"))


def _figure(rows: Mapping[Query, Rows], query: Query, draw: _Draw, series: str) -> Element:
    what, found = _FIGURES[query], rows[query]
    if not found:
        return element("p", f"Not shown, {what.name}: {what.absent}.", class_="note")
    names = list(found.by(series))
    entries = [(name.replace("_", " "), f"swatch hue {_hue(index, name)}") for index, name in enumerate(names)]
    return figure(draw(found), what.caption, legend(entries), source=query)


def _hue(index: int, name: str) -> str:
    return f"hue{_HUE_OF_OUTCOME.get(name, index % HUES)}"


def _operations(rows: Rows) -> Element:
    """Shares, one above the other."""
    parts = rows.by("operation")
    iterations = next(iter(parts.values())).numbers("iteration")
    plot = Plot(_span(iterations), axis_for((0, 1), 4), HEIGHT)
    floor = [0.0] * len(iterations)
    marks: list[Node] = []
    for index, (name, part) in enumerate(parts.items()):
        ceiling = [low + share for low, share in zip(floor, part.numbers("share"), strict=True)]
        edge = [*zip(iterations, ceiling, strict=True), *reversed(list(zip(iterations, floor, strict=True)))]
        corners = " ".join(f"{plot.x.share(x) * 100:.3f},{plot.down(y):.2f}" for x, y in edge)
        shape = element("polygon", element("title", name), points=corners, class_=f"area {_hue(index, name)}")
        marks.append(stretched(HEIGHT, shape))
        floor = ceiling
    return plot.figure(*marks, title="Shares of the operations over training iterations", x_title="iteration")


def _seeds(rows: Rows) -> Element:
    """One bar per blueprint."""
    parts = rows.by("blueprint")
    most = max(rows.numbers("seeds_of_blueprint"))
    marks: list[Node] = []
    for row, (blueprint, part) in enumerate(parts.items()):
        top, start = row * ROW_HEIGHT, 0.0
        marks.append(text("-8", top + 12, blueprint, "label end"))
        for outcome, count in zip(part.texts("outcome"), part.numbers("seeds"), strict=True):
            hover = element("title", f"{blueprint}: {count:.0f} {outcome}")
            place = {"x": percentage(start / most), "y": top, "width": percentage(count / most), "height": BAR_HEIGHT}
            marks.append(element("rect", hover, class_=f"bar {_hue(0, outcome)}", **place))
            start += count
        marks.append(element("svg", text("6", top + 12, f"{start:.0f}", "tick start"), x=percentage(start / most)))
    title = "Seeds by blueprint and outcome"
    return drawing(len(parts) * ROW_HEIGHT, title, *marks, left=NAME_ROOM, right=NUMBER_ROOM)


def _rewards(rows: Rows) -> Element:
    """One curve per term."""
    iterations = rows.numbers("iteration")
    plot = Plot(_span(iterations), axis_for([0.0, *rows.numbers("paid_per_episode")], 5), HEIGHT)
    marks: list[Node] = [plot.level(0, "zero")]
    for index, (name, part) in enumerate(rows.by("term").items()):
        points = list(zip(part.numbers("iteration"), part.numbers("paid_per_episode"), strict=True))
        marks.append(plot.curve(points, f"hue {_hue(index, name)}"))
    return plot.figure(*marks, title="Reward by term over training iterations", x_title="iteration")


def _span(iterations: Sequence[float]) -> Axis:
    return counting_axis(max(1, round(max(iterations))))
