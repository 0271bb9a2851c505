"""Plots as inline SVG that fits any width while its text keeps its size.

Horizontal places are percentages of the drawing's width, vertical ones pixels. Curves, which SVG cannot draw in
percentages, lie in an inner drawing of 100 units' width that is stretched, with strokes that are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from esper.experiments.analysis import Interval
from esper.ui.report.axes import Axis
from esper.ui.report.markup import Element, Node, element

Points = Sequence[tuple[float, float]]

TICK_ROOM = 22
"""Pixels below the drawing for the labels of the horizontal axis."""
TITLE_ROOM = 18
"""Pixels below those for its title."""


@dataclass(frozen=True)
class Plot:
    """The coordinates of a drawing."""

    x: Axis
    y: Axis
    height: int
    """Pixels between the lowest and the highest value."""
    left: int = 44
    """Pixels for labels on the left."""
    right: int = 12
    label_ticks: bool = True
    """Whether the horizontal axis has labels."""

    def across(self, value: float) -> str:
        """Horizontal place of a value."""
        return percentage(self.x.share(value))

    def down(self, value: float) -> float:
        """Vertical place of a value."""
        return (1 - self.y.share(value)) * self.height

    def curve(self, points: Points, kind: str) -> Element:
        """A line through the points; gaps where they are not finite."""
        return stretched(self.height, element("path", d=self._path(points), class_=f"curve {kind}"))

    def dot(self, x: float, y: float, kind: str, title: str) -> Element:
        """A mark that says on hovering what it is."""
        return element("circle", element("title", title), cx=self.across(x), cy=self.down(y), r=4, class_=f"dot {kind}")

    def whisker_across(self, found: Interval, y: float, kind: str) -> Element:
        """A horizontal interval at a value of the vertical axis."""
        return across(self.across(found.low), self.across(found.high), self.down(y), f"whisker {kind}")

    def whisker_down(self, found: Interval, x: float, kind: str) -> Element:
        """A vertical interval at a value of the horizontal axis."""
        return vertical(self.across(x), self.down(found.low), self.down(found.high), f"whisker {kind}")

    def level(self, value: float, kind: str) -> Element:
        """A horizontal line right across."""
        return across("0%", "100%", self.down(value), kind)

    def figure(self, *marks: Node, title: str, x_title: str = "") -> Element:
        """The drawing with grid and tick labels; ``title`` is read to those who cannot see it."""
        grid = [self.level(tick, "grid") for tick in self.y.ticks]
        left = [text("-8", self.down(tick) + 4, self.y.label(tick), "tick end") for tick in self.y.ticks]
        below = [
            text(self.across(tick), self.height + TICK_ROOM - 4, self.x.label(tick), "tick middle")
            for tick in (self.x.ticks if self.label_ticks else ())
        ]
        named = [text("50%", self.height + TICK_ROOM + TITLE_ROOM - 4, x_title, "tick middle")] if x_title else []
        height = self.height + (TICK_ROOM if self.label_ticks else 0) + (TITLE_ROOM if x_title else 0)
        return drawing(height, title, *grid, *left, *below, *named, *marks, left=self.left, right=self.right)

    def _path(self, points: Points) -> str:
        words: list[str] = []
        pen = "M"
        for x, y in points:
            if math.isfinite(y):
                words.append(f"{pen}{self.x.share(x) * 100:.3f} {self.down(y):.2f}")
                pen = "L"
            else:
                pen = "M"
        return "".join(words)


def drawing(height: float, title: str, *marks: Node, left: int = 0, right: int = 0) -> Element:
    """An SVG as wide as there is room, with so many pixels kept free on its sides for labels."""
    svg = element("svg", element("title", title), *marks, role="img", width="100%", height=height)
    return element("div", svg, class_="plot", style=f"padding:8px {right}px 0 {left}px")


def stretched(height: float, *marks: Node) -> Element:
    """An inner drawing 100 units wide that fills the width; one unit of height is one pixel."""
    return element(
        "svg", *marks, width="100%", height=height, viewBox=f"0 0 100 {height:g}", preserveAspectRatio="none"
    )


def text(x: str, y: float, content: str, kind: str) -> Element:
    """A label; ``kind`` has its anchor: start, middle or end."""
    return element("text", content, x=x, y=y, class_=kind)


def across(x1: str, x2: str, y: float, kind: str) -> Element:
    """A horizontal line."""
    return element("line", x1=x1, x2=x2, y1=y, y2=y, class_=kind)


def vertical(x: str, y1: float, y2: float, kind: str) -> Element:
    """A vertical line."""
    return element("line", x1=x, x2=x, y1=y1, y2=y2, class_=kind)


def percentage(share: float) -> str:
    """A share of the width."""
    return f"{share * 100:.3f}%"
