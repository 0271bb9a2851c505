"""Who scores how much, and how surely: controllers or configurations that played the same instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from esper.experiments.analysis import Interval
from esper.experiments.comparison import Comparison, Standing
from esper.ui.figures.marks import BLUE, GREY, LABEL_SIZE, SOFT, colour, marker, name_rows
from esper.ui.figures.record import Column, Exhibit, Figure, Files, Table
from esper.ui.figures.rows import Rows, Value
from esper.ui.figures.written import count, decimals, share, signed_decimals, text
from esper.ui.formats import MEGA, p_value
from esper.ui.standings import basis, verdict_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_ROW_HEIGHT = 0.19
_MARGIN = 0.6
"""Inches of a figure of rows that are not rows."""
_COLUMNS = (
    *("name", "score", "score_low", "score_high", "accuracy", "accuracy_low", "accuracy_high"),
    *("growth", "growth_low", "growth_high", "ahead", "ahead_low", "ahead_high", "better", "p", "verdict"),
    "megaflops",
)
_NOBODY = "nobody has played"


def standing_exhibits(name: str, about: str, source: Files, comparison: Comparison) -> list[Exhibit]:
    """Two figures and a table; ``about`` says who played what."""
    lines, reference = comparison.standings, comparison.reference.name
    rows = Rows(_COLUMNS, tuple(_row(comparison, one) for one in lines))
    spread = "with 95% intervals"
    scores = Figure(
        f"{name}_scores",
        f"Mean score of {about}, {spread}. Score is test accuracy minus the rent on added parameters.",
        source,
        _draw_scores,
        _NOBODY,
        height=_MARGIN + _ROW_HEIGHT * len(lines),
    )
    growth = Figure(
        f"{name}_growth",
        f"Mean test accuracy of {about} against mean parameters added, as a share of the host's, {spread}.",
        source,
        _draw_growth,
        _NOBODY,
        height=2.6,
    )
    caption = (
        f"Mean figures of {about}. Ahead: mean score of {reference} less that of the other, with its 95% interval; "
        f"better: how often {reference} scores higher on an instance. {basis(comparison)}"
    )
    table = Table(name, caption, source, _table_columns(lines), _NOBODY)
    return [(scores, rows), (growth, rows), (table, rows)]


def _row(comparison: Comparison, one: Standing) -> tuple[Value, ...]:
    bounds = [value for found in (one.score, one.accuracy, one.growth) for value in _bounds(found)]
    flops = None if one.flops is None else one.flops.estimate / MEGA
    if one.against is None:
        return (one.name, *bounds, None, None, None, None, None, None, flops)
    difference = one.against.difference
    ahead = (difference.estimate, *_bounds(difference.interval)[1:])
    return (one.name, *bounds, *ahead, one.against.better, difference.p, verdict_words(comparison, one), flops)


def _bounds(found: Interval | None) -> tuple[Value, Value, Value]:
    return (None, None, None) if found is None else (found.estimate, found.low, found.high)


def _table_columns(lines: Sequence[Standing]) -> tuple[Column, ...]:
    spent = [Column("megaflops", "MFLOP", count)] if any(line.flops is not None for line in lines) else []
    compared = [
        Column("ahead", "ahead", signed_decimals),
        Column("ahead_low", "from", signed_decimals),
        Column("ahead_high", "to", signed_decimals),
        Column("better", "better", share),
        Column("p", "p", _p),
        Column("verdict", "verdict", text, numeric=False),
    ]
    return (
        Column("name", "", text, numeric=False),
        Column("score", "score", decimals),
        Column("accuracy", "accuracy", share),
        Column("growth", "added", share),
        *spent,
        *(compared if any(line.against is not None for line in lines) else []),
    )


def _p(value: Value) -> str:
    return p_value(value) if isinstance(value, int | float) else text(value)


def _draw_scores(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    names, values = rows.texts("name"), rows.numbers("score")
    places = range(len(names))
    shades = [BLUE if ahead is None else GREY for ahead in rows.column("ahead")]
    axes.hlines(places, rows.numbers("score_low"), rows.numbers("score_high"), color=shades, linewidth=1.6)
    axes.scatter(values, places, color=shades, s=14, zorder=3)
    name_rows(axes, names)
    axes.set_xlabel("score")


def _draw_growth(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    across, up = _whiskers(rows, "growth"), _whiskers(rows, "accuracy")
    for index, name in enumerate(rows.texts("name")):
        x, y = across(index), up(index)
        style: dict[str, Any] = {
            "color": colour(index),
            "marker": marker(index),
            "elinewidth": 0.8,
            "linestyle": "none",
        }
        axes.errorbar([x[0]], [y[0]], xerr=[[x[1]], [x[2]]], yerr=[[y[1]], [y[2]]], label=name, **style)
    axes.set_xlabel("added parameters / host's")
    axes.set_ylabel("test accuracy")
    axes.tick_params(labelsize=LABEL_SIZE, colors=SOFT)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def _whiskers(rows: Rows, name: str) -> Callable[[int], tuple[float, float, float]]:
    """A value, and how far its interval reaches below and above."""
    values, low, high = rows.numbers(name), rows.numbers(f"{name}_low"), rows.numbers(f"{name}_high")

    def of(index: int) -> tuple[float, float, float]:
        value = values[index]
        return value, max(value - low[index], 0), max(high[index] - value, 0)

    return of
