"""Two measures of several controllers against each other, with an interval for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper.experiments.analysis import Interval
from esper.ui.formats import percent
from esper.ui.labels import spread_apart
from esper.ui.report.axes import axis_for
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, text

HEIGHT = 280
LABEL_GAP = 16
MOST_TICKS = 5


@dataclass(frozen=True)
class Mark:
    """One controller."""

    name: str
    kind: str
    """Class of its marks: policy, other, ..."""
    x: Interval
    y: Interval


def accuracy_against_growth(marks: Sequence[Mark], name_room: int) -> Element:
    """Accuracy (y) against added parameters over the host's (x)."""

    def hover(mark: Mark) -> str:
        return f"{mark.name}: accuracy {percent(mark.y.estimate)}, parameters +{percent(mark.x.estimate)}"

    return scatter(marks, "Accuracy against added parameters", "parameters added / host's", hover, name_room)


def scatter(marks: Sequence[Mark], title: str, x_title: str, hover: Callable[[Mark], str], name_room: int) -> Element:
    """One dot per mark with whiskers both ways; names on the right, in ``name_room`` pixels, with lines to their dots.

    ``hover`` is what a dot says when it is pointed at.
    """
    across = axis_for([bound for one in marks for bound in (one.x.low, one.x.high)], MOST_TICKS)
    up = axis_for([bound for one in marks for bound in (one.y.low, one.y.high)])
    plot = Plot(across, up, HEIGHT, right=name_room)
    labels = spread_apart([plot.down(one.y.estimate) for one in marks], LABEL_GAP, 0, plot.height)
    drawn: list[Node] = []
    for one, label in zip(marks, labels, strict=True):
        x, y = one.x.estimate, one.y.estimate
        drawn.append(element("line", x1=plot.across(x), x2="100%", y1=plot.down(y), y2=label, class_="leader"))
        drawn.append(plot.whisker_across(one.x, y, one.kind))
        drawn.append(plot.whisker_down(one.y, x, one.kind))
        drawn.append(plot.dot(x, y, one.kind, hover(one)))
        drawn.append(element("svg", text("5", label + 4, one.name, f"label start {one.kind}"), x="100%"))
    return plot.figure(*drawn, title=title, x_title=x_title)
