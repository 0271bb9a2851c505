"""Figures and tables of who scores how much, and how surely: controllers, arms or ways of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from esper.control.learned import POLICY
from esper.dash.formats import MEGA, score, signed_score
from esper.lab.comparison import Comparison
from esper.lab.contest import ARMS
from esper.lab.figures.drawing import BLUE, GREEN, GREY, MARKERS, ROW_HEIGHT, VERMILION, legend_above, name_rows
from esper.lab.figures.exhibit import Column, Exhibit, Figure, Files, Row, Rows, Table
from esper.lab.standings import SPLIT_TITLES, describe_basis, standings_columns, standings_rows
from esper.tasks.suite import Split

_MARGIN = 0.6
"""Inches of a figure of rows that are not rows."""
_SHADES = {"policy": BLUE, "above": GREEN, "below": VERMILION, "other": GREY}
_NOBODY = "nobody has played"
_NO_FLOPS = "the FLOPs of training are not recorded there"
_UP_AND_LEFT = "Up and to the left is better."
_FIELDS = (
    "score, test_accuracy, added_parameters / host_parameters and flops, averaged over training seeds and instances; "
    "intervals are over both.\n"
)


def exhibit_evaluation(comparisons: Mapping[Split, Comparison]) -> dict[Split, dict[str, Exhibit]]:
    """An evaluated policy and the other controllers on each split that was played, in one run or in several."""
    return {
        split: exhibit_comparison(
            f"evaluation_{split}",
            f"all controllers on the same {comparison.instances} {SPLIT_TITLES[split]}",
            _evaluation_source(split, comparison.seeds),
            comparison,
        )
        for split, comparison in comparisons.items()
    }


def _evaluation_source(split: Split, seeds: int) -> Files:
    """Where a split's figures come from."""
    where, over = (
        ("the run's", "; intervals are over instances, drawn within families.")
        if seeds == 1
        else ("each run's", ", then over the runs; intervals are over runs, each of which has instances of its own.")
    )
    return Files(
        f"evaluation.json in {where} directory, the records whose split is {split}: score, test_accuracy and "
        f"added_parameters / host_parameters, averaged over the instances by controller{over}\n"
    )


def exhibit_configurations(found: Comparison) -> dict[str, Exhibit]:
    """The first configuration against the others."""
    about = f"all configurations, {found.seeds} training seeds each, on the same {found.instances} held-out instances"
    source = Files(
        f"CONFIGURATION/seed-N/{ARMS}/{POLICY}.json in the comparison's folder, the list value.outcomes: {_FIELDS}"
    )
    return exhibit_comparison("configurations", about, source, found)


def exhibit_arms(found: Comparison, configuration: str) -> dict[str, Exhibit]:
    """Policies of a configuration among all arms."""
    about = (
        f"the policies of {configuration} ({found.seeds} training seeds) and all other arms on the same "
        f"{found.instances} held-out instances"
    )
    source = Files(
        f"FIRST-CONFIGURATION/{ARMS}/ARM.json and FIRST-CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's "
        f"folder, the list value.outcomes: {_FIELDS}"
    )
    return exhibit_comparison("arms", about, source, found)


def exhibit_comparison(name: str, about: str, source: Files, comparison: Comparison) -> dict[str, Exhibit]:
    """All figures and tables; ``about`` says who played what, ``source`` where that is known from."""
    rows = standings_rows(comparison)
    spread, reference = "with 95% intervals", comparison.reference.name
    height = _MARGIN + ROW_HEIGHT * len(rows)

    def draw(kind: str, caption: str, how: Callable[[Canvas, Rows], None], shown: Rows, height: float = 2.6) -> Exhibit:
        absent = _NO_FLOPS if kind == "flops" and rows else _NOBODY
        return Exhibit(Figure(f"{name}_{kind}", caption, source, how, absent, height), shown)

    scores = f"Mean score of {about}, {spread}. Score is test accuracy minus the rent on added parameters."
    differences = (
        f"Mean score of {reference} minus that of each other, paired by instance, {spread}: {about}. Coloured are "
        "those that the table calls better or worse."
    )
    accuracy = f"Mean test accuracy of {about} against"
    growth = f"{accuracy} mean parameters added, as a share of the host's, {spread}. {_UP_AND_LEFT}"
    flops = f"{accuracy} the mean FLOPs of training one network, {spread}. {_UP_AND_LEFT}"
    against_growth = partial(_draw_accuracy, "added", 1, "parameters added / host's")
    against_flops = partial(_draw_accuracy, "flops", MEGA, "training MFLOP")
    return {
        "scores": draw("scores", scores, _draw_scores, rows, height),
        "differences": draw("differences", differences, _draw_differences, _keep_known(rows, "difference"), height),
        "growth": draw("growth", growth, against_growth, rows),
        "flops": draw("flops", flops, against_flops, _keep_known(rows, "flops")),
        "standings": Exhibit(_standings_table(name, about, source, comparison), rows),
        "families": _exhibit_families(name, about, source, comparison),
        "seeds": _exhibit_seeds(name, about, source, comparison),
    }


def _keep_known(rows: Rows, name: str) -> Rows:
    """Those of which that value is known."""
    known = [value is not None for value in rows.column(name)]
    return Rows(rows.columns, tuple(row for row, is_known in zip(rows.values, known, strict=True) if is_known))


def _standings_table(name: str, about: str, source: Files, comparison: Comparison) -> Table:
    columns, reference = standings_columns(comparison), comparison.reference.name
    shown = {column.name for column in columns}
    parts = [
        f"{about[:1].upper()}{about[1:]}.",
        "Means with 95% intervals in brackets. Score is test accuracy minus the rent on added parameters; middle half: "
        "interquartile mean of the score; added are parameters over the host's.",
        f"Better: how often {reference} scores higher on an instance, ties counting half; it describes, and judges "
        "nothing.",
        *(["MFLOP is what training one network took, without measurements."] if "flops" in shown else []),
        *(["Environment steps are what finding it took."] if "environment_steps" in shown else []),
        f"Ahead: mean score of {reference} less that of the other. p: seeds and instances crossed, both at random.",
        describe_basis(comparison),
    ]
    return Table(name, " ".join(parts), source, columns, _NOBODY)


def _exhibit_families(name: str, about: str, source: Files, comparison: Comparison) -> Exhibit:
    names = [one.name for one in comparison.standings]

    def best(name: str) -> Callable[[Row], str]:
        return lambda row: "best" if row[name] == max(float(str(row[one])) for one in names) else ""

    caption = f"Mean score of {about}, by family of instances; the best of each family is set in bold."
    columns = (Column("family"), *(Column(name, score, name, mark=best(name)) for name in names))
    rows = [
        {"family": family, **{name: means[name] for name in names}}
        for family, means in comparison.family_scores.items()
    ]
    table = Table(f"{name}_families", caption, source, columns, _NOBODY, upright=True)
    return Exhibit(table, Rows.of(rows))


def _exhibit_seeds(name: str, about: str, source: Files, comparison: Comparison) -> Exhibit:
    runs = [f"run {number}" for number in range(1, comparison.seeds + 1)]
    values = [(one.name, *one.by_seed) for one in comparison.standings if len(one.by_seed) == len(runs)]
    columns = (Column("name", title=""), *(Column(run, score) for run in runs))
    caption = f"Mean score of {about}, by run, in the order in which they are given."
    table = Table(f"{name}_seeds", caption, source, columns, "there is one run only")
    return Exhibit(table, Rows(("name", *runs), tuple(values) if comparison.seeds > 1 else ()))


def _draw_scores(canvas: Canvas, rows: Rows) -> None:
    shades = [BLUE if kind == "policy" else GREY for kind in rows.texts("kind")]
    _draw_intervals(canvas.subplots(), rows, "score", "score", shades, score)


def _draw_differences(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    axes.axvline(0, color=GREY, linewidth=0.6)
    shades = [_SHADES[kind] for kind in rows.texts("kind")]
    _draw_intervals(axes, rows, "difference", "mean score less the other's", shades, signed_score)


def _draw_intervals(
    axes: Axes, rows: Rows, name: str, title: str, shades: Sequence[str], write: Callable[[float], str]
) -> None:
    """A row for each, with its value on the right."""
    values = rows.numbers(name)
    places = range(len(values))
    axes.hlines(places, rows.numbers(f"{name}_low"), rows.numbers(f"{name}_high"), color=shades, linewidth=1.6)
    axes.scatter(values, places, color=shades, s=14, zorder=3)
    name_rows(axes, rows.texts("name"))
    for place, value, shade in zip(places, values, shades, strict=True):
        axes.annotate(
            write(value), (1.02, place), xycoords=axes.get_yaxis_transform(), va="center", color=shade, fontsize=6.5
        )
    axes.set_xlabel(title)


def _draw_accuracy(across: str, unit: float, title: str, canvas: Canvas, rows: Rows) -> None:
    """Test accuracy against what it costs."""
    axes = canvas.subplots()
    costs, accuracies = _whiskers(rows, across, unit), _whiskers(rows, "accuracy")
    for name, cost, accuracy, marker in zip(rows.texts("name"), costs, accuracies, cycle(MARKERS), strict=False):
        (x, left, right), (y, down, up) = cost, accuracy
        bars = axes.errorbar([x], [y], xerr=[[left], [right]], yerr=[[down], [up]], elinewidth=0.8, label=name)
        bars.lines[0].set(marker=marker, linestyle="none")
    axes.set_xlabel(title)
    axes.set_ylabel("test accuracy")
    legend_above(canvas, 3)


def _whiskers(rows: Rows, name: str, unit: float = 1) -> list[tuple[float, float, float]]:
    """Values, and how far their intervals reach below and above."""
    bounds = zip(*(rows.numbers(f"{name}{end}") for end in ("", "_low", "_high")), strict=True)
    return [(value / unit, max(value - low, 0) / unit, max(high - value, 0) / unit) for value, low, high in bounds]
