"""Who scores how much, and how surely: controllers or configurations that played the same instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from esper.experiments.analysis import Interval
from esper.experiments.comparison import Comparison, Standing
from esper.tasks.suite import Split
from esper.ui import formats
from esper.ui.figures.marks import BLUE, GREEN, GREY, VERMILION, colour, marker, name_rows
from esper.ui.figures.record import Column, Exhibit, Figure, Files, Table
from esper.ui.figures.rows import Row, Rows, Value
from esper.ui.figures.written import count, decimals, share, signed_decimals, signed_share, text
from esper.ui.formats import MEGA
from esper.ui.standings import basis, verdict_kind, verdict_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PLACES = {"heldout": "held-out instances", "transfer": "instances of families never trained on"}
_ROW_HEIGHT = 0.19
_MARGIN = 0.6
"""Inches of a figure of rows that are not rows."""
_BOUNDED = ("score", "accuracy", "growth", "megaflops", "ahead")
"""Columns of the rows with a 95% interval, whose ends are in columns named _low and _high."""
_COLUMNS = (
    *("name", "kind", "middle", "better", "p", "verdict", "environment_steps"),
    *(f"{name}{end}" for name in _BOUNDED for end in ("", "_low", "_high")),
)
_SHADES = {"policy": BLUE, "above": GREEN, "below": VERMILION, "other": GREY}
_NOBODY = "nobody has played"
_UP_AND_LEFT = "Up and to the left is better."
_COLUMNS_MEAN = (
    "Means with 95% intervals in brackets. Score is test accuracy minus the rent on added parameters; middle half: "
    "interquartile mean of the score; added are parameters over the host's. Better: how often {reference} scores "
    "higher on an instance, ties counting half; it describes, and judges nothing. "
)
_COSTS = "MFLOP is what training one network took, without measurements. "
_STEPS = "Environment steps are what finding it took. "
_METHOD = "Ahead: mean score of {reference} less that of the other. p: seeds and instances crossed, both at random."


@dataclass(frozen=True)
class ComparisonExhibits:
    """A comparison in figures and tables."""

    scores: Exhibit
    differences: Exhibit
    growth: Exhibit
    flops: Exhibit
    standings: Exhibit
    families: Exhibit
    seeds: Exhibit

    def all(self) -> list[Exhibit]:
        """For papers."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def exhibit_comparison(name: str, about: str, source: Files, comparison: Comparison) -> ComparisonExhibits:
    """All figures and tables; ``about`` says who played what, ``source`` where that is known from."""
    rows = Rows(_COLUMNS, tuple(_row(comparison, one) for one in comparison.standings))
    others, costly = _with(rows, "ahead"), _with(rows, "megaflops")
    spread, reference = "with 95% intervals", comparison.reference.name
    height = _MARGIN + _ROW_HEIGHT * len(rows)

    def figure(kind: str, caption: str, draw: Callable[[Canvas, Rows], None], height: float) -> Figure:
        return Figure(f"{name}_{kind}", caption, source, draw, _NOBODY, height)

    scores = f"Mean score of {about}, {spread}. Score is test accuracy minus the rent on added parameters."
    differences = (
        f"Mean score of {reference} minus that of each other, paired by instance, {spread}: {about}. Coloured are "
        "those that the table calls better or worse."
    )
    growth = (
        f"Mean test accuracy of {about} against mean parameters added, as a share of the host's, {spread}. "
        f"{_UP_AND_LEFT}"
    )
    flops = f"Mean test accuracy of {about} against the mean FLOPs of training one network, {spread}. {_UP_AND_LEFT}"
    return ComparisonExhibits(
        (figure("scores", scores, _draw_scores, height), rows),
        (figure("differences", differences, _draw_differences, height), others),
        (figure("growth", growth, partial(_draw_accuracy, "growth", "parameters added / host's"), 2.6), rows),
        (figure("flops", flops, partial(_draw_accuracy, "megaflops", "training MFLOP"), 2.6), costly),
        (_standings_table(name, about, source, comparison), rows),
        _exhibit_families(name, about, source, comparison),
        _exhibit_seeds(name, about, source, comparison),
    )


def _with(rows: Rows, name: str) -> Rows:
    """Those of which that value is known."""
    known = [value is not None for value in rows.column(name)]
    return Rows(rows.columns, tuple(row for row, is_known in zip(rows.values, known, strict=True) if is_known))


def _row(comparison: Comparison, one: Standing) -> tuple[Value, ...]:
    against = one.against
    difference = against and against.difference
    plain = (
        *(one.name, verdict_kind(against), one.middle, against and against.better, difference and difference.p),
        *(verdict_words(comparison, one) or None, one.environment_steps),
    )
    ahead = (difference and difference.estimate, *_bounds(difference and difference.interval)[1:])
    bounded = [value for found in (one.score, one.accuracy, one.growth) for value in _bounds(found)]
    return (*plain, *bounded, *_bounds(one.flops, MEGA), *ahead)


def _bounds(found: Interval | None, unit: float = 1) -> tuple[Value, Value, Value]:
    return (None, None, None) if found is None else (found.estimate / unit, found.low / unit, found.high / unit)


def _standings_table(name: str, about: str, source: Files, comparison: Comparison) -> Table:
    lines = comparison.standings
    costs = any(line.flops is not None for line in lines)
    steps = any(line.environment_steps is not None for line in lines)
    columns = (
        Column("name", "", text, numeric=False, mark=lambda row: "policy" if row["verdict"] is None else ""),
        _bounded("score", "score", decimals),
        Column("middle", "middle half", decimals),
        _bounded("accuracy", "test accuracy", share),
        _bounded("growth", "added", signed_share),
        *([_bounded("megaflops", "MFLOP", count)] if costs else []),
        _bounded("ahead", "ahead", _blank(signed_decimals)),
        Column("better", "better", _blank(share)),
        Column("p", "p", _blank(_p)),
        Column(
            "verdict",
            "verdict",
            _blank(text),
            numeric=False,
            mark=lambda row: str(row["kind"]) if row["verdict"] else "",
        ),
        *([Column("environment_steps", "environment steps", _blank(count))] if steps else []),
    )
    told = f"{_COLUMNS_MEAN}{_COSTS if costs else ''}{_STEPS if steps else ''}{_METHOD}"
    caption = f"{about[:1].upper()}{about[1:]}. {told.format(reference=comparison.reference.name)} {basis(comparison)}"
    return Table(name, caption, source, columns, _NOBODY)


def _bounded(name: str, heading: str, written: Callable[[Value], str]) -> Column:
    """A column with the value's interval in brackets."""

    def note(row: Row) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return "" if low is None else f"[{written(low)} to {written(high)}]"

    return Column(name, heading, written, note=note)


def _blank(written: Callable[[Value], str]) -> Callable[[Value], str]:
    """Nothing for what is missing."""
    return lambda value: "" if value is None else written(value)


def _p(value: Value) -> str:
    return formats.p_value(value) if isinstance(value, int | float) else text(value)


def _exhibit_families(name: str, about: str, source: Files, comparison: Comparison) -> Exhibit:
    names = [one.name for one in comparison.standings]

    def best(name: str) -> Callable[[Row], str]:
        return lambda row: "best" if row[name] == max(float(str(row[one])) for one in names) else ""

    caption = f"Mean score of {about}, by family of instances; the best of each family is set in bold."
    columns = (
        Column("family", "family", text, numeric=False),
        *(Column(name, name, decimals, mark=best(name)) for name in names),
    )
    rows = [(family, *(means[name] for name in names)) for family, means in comparison.family_scores.items()]
    table = Table(f"{name}_families", caption, source, columns, _NOBODY, upright=True)
    return table, Rows(("family", *names), tuple(rows))


def _exhibit_seeds(name: str, about: str, source: Files, comparison: Comparison) -> Exhibit:
    runs = [f"run {number}" for number in range(1, comparison.seeds + 1)]
    values = [(one.name, *one.by_seed) for one in comparison.standings if len(one.by_seed) == len(runs)]
    columns = (Column("name", "", text, numeric=False), *(Column(run, run, decimals) for run in runs))
    caption = f"Mean score of {about}, by run, in the order in which they are given."
    table = Table(f"{name}_seeds", caption, source, columns, "there is one run only")
    return table, Rows(("name", *runs), tuple(values) if comparison.seeds > 1 else ())


def _draw_scores(canvas: Canvas, rows: Rows) -> None:
    shades = [BLUE if kind == "policy" else GREY for kind in rows.texts("kind")]
    _draw_intervals(canvas.subplots(), rows, "score", "score", shades, formats.score)


def _draw_differences(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    axes.axvline(0, color=GREY, linewidth=0.6)
    shades = [_SHADES[kind] for kind in rows.texts("kind")]
    _draw_intervals(axes, rows, "ahead", "mean score less the other's", shades, formats.signed)


def _draw_intervals(
    axes: Axes, rows: Rows, name: str, title: str, shades: Sequence[str], written: Callable[[float], str]
) -> None:
    """A row for each, with its value on the right."""
    values = rows.numbers(name)
    places = range(len(values))
    axes.hlines(places, rows.numbers(f"{name}_low"), rows.numbers(f"{name}_high"), color=shades, linewidth=1.6)
    axes.scatter(values, places, color=shades, s=14, zorder=3)
    name_rows(axes, rows.texts("name"))
    for place, value, shade in zip(places, values, shades, strict=True):
        axes.annotate(
            written(value), (1.02, place), xycoords=axes.get_yaxis_transform(), va="center", color=shade, fontsize=6.5
        )
    axes.set_xlabel(title)


def _draw_accuracy(across: str, title: str, canvas: Canvas, rows: Rows) -> None:
    """Test accuracy against what it costs."""
    axes = canvas.subplots()
    x, y = _whiskers(rows, across), _whiskers(rows, "accuracy")
    for index, name in enumerate(rows.texts("name")):
        style: dict[str, Any] = {"color": colour(index), "marker": marker(index), "elinewidth": 0.8, "label": name}
        (place, left, right), (height, down, up) = x[index], y[index]
        axes.errorbar([place], [height], xerr=[[left], [right]], yerr=[[down], [up]], linestyle="none", **style)
    axes.set_xlabel(title)
    axes.set_ylabel("test accuracy")
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def _whiskers(rows: Rows, name: str) -> list[tuple[float, float, float]]:
    """Values, and how far their intervals reach below and above."""
    bounds = zip(*(rows.numbers(f"{name}{end}") for end in ("", "_low", "_high")), strict=True)
    return [(value, max(value - low, 0), max(high - value, 0)) for value, low, high in bounds]


def exhibit_evaluation(
    comparisons: Mapping[Split, Comparison], source: Callable[[Split], Files]
) -> dict[Split, ComparisonExhibits]:
    """An evaluated policy and the other controllers, on each split that was played."""
    return {
        split: exhibit_comparison(
            f"evaluation_{split}",
            f"all controllers on the same {comparison.instances} {PLACES[split]}",
            source(split),
            comparison,
        )
        for split, comparison in comparisons.items()
    }


_EVALUATED = (
    "the records whose split is {split}: score, test_accuracy and added_parameters / host_parameters, averaged over "
    "the instances by controller"
)


def evaluation_source(split: Split) -> Files:
    """Where a split's figures come from."""
    return Files(
        f"evaluation.json in the run's directory, {_EVALUATED.format(split=split)}; intervals are over instances, "
        "drawn within families.\n"
    )


def over_seeds_source(split: Split) -> Files:
    """The same of several runs."""
    return Files(
        f"evaluation.json in each run's directory, {_EVALUATED.format(split=split)}, then over the runs; intervals are "
        "over runs, each of which has instances of its own.\n"
    )
