"""What the figures have in common: colours that the colour-blind tell apart, markers, legends, axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from esper.ui.formats import score
from esper.ui.labels import spread_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
SKY, PURPLE, YELLOW = "#56b4e9", "#cc79a7", "#f0e442"
INK, SOFT, LINE, PAPER = "#1c2430", "#5b6675", "#e3e7ed", "#ffffff"
"""Of text, of what matters less, of grids, and of the background: on a page they follow its style sheet."""
GREY = "#7f8fa6"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK, YELLOW)
"""Okabe and Ito (2008)."""
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

LABEL_SIZE = 6
_LABEL_GAP = 0.075
"""Between labels, as a share of the height."""


def colour(index: int) -> str:
    """Of the line, bar or dots of that number; they come round again."""
    return COLOURS[index % len(COLOURS)]


def dashes(index: int) -> str:
    """Of the line of that number: another one wherever the colours come round, and for neighbours."""
    return DASHES[(index + index // len(COLOURS)) % len(DASHES)]


def marker(index: int) -> str:
    """Of the dots of that number."""
    return MARKERS[index % len(MARKERS)]


def legend_above(canvas: Canvas, axes: Axes, columns: int = 4) -> None:
    """The legend of the axes, above the whole figure."""
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def count_iterations(axes: Axes, unit: str = "iteration") -> None:
    """A horizontal axis with whole numbers only."""
    axes.set_xlabel(unit)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def few_ticks(axes: Axes, count: int = 5) -> None:
    """At most so many on the vertical axis."""
    axes.locator_params(axis="y", nbins=count)


def levels_beside(axes: Axes, levels: Mapping[str, float]) -> None:
    """Dashed lines right across, named on their right, where names make room for each other."""
    low, high = axes.get_ylim()
    shares = [(value - low) / (high - low) for value in levels.values()]
    for (name, value), share, place in zip(levels.items(), shares, spread_apart(shares, _LABEL_GAP, 0, 1), strict=True):
        axes.axhline(value, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"{name} {score(value)}",
            (1, share),
            (1.06, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=LABEL_SIZE,
            color=SOFT,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": GREY, "shrinkA": 0, "shrinkB": 0},
        )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows from the top, named on the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
