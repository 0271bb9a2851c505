"""What the query beside a figure returns is what the figure draws: every figure with a query, on pages and in files.

The SQL is taken from where readers find it, run by SQLite alone, and compared with the numbers that the drawing
was given, exactly.
"""

import html
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas

from esper.dash.formats import difference, measure, signed_percent
from esper.dash.pages import describe_learning
from esper.dash.progress import moving_average
from esper.lab.drawing import STAGE_STYLES, draw_svg
from esper.lab.exhibit import Drawing, Query, run_queries
from esper.lab.grown_figures import MOMENTS, grown_exhibits
from esper.lab.policy_figures import LEARNING, health_figure
from esper.lab.report import report_on
from esper.lifecycle.table import Stage
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from esper.train.iteration import Anomaly, record_iteration
from factories import Loop
from lab import planted
from lab.figures_cases import grown, trained
from lab.planted import EXPLODED

pytestmark = pytest.mark.landing

Record = dict[str, Any]
Curve = tuple[tuple[float, float], ...]
OBJECTIVES = [0.4, 0.7, 0.5, 0.66, 0.61, 0.58, 0.72, 0.69]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose J goes up and down for longer than it is smoothed over."""
    made = trained(tmp_path_factory.mktemp("drawn") / "run")
    with RunStore.open(made.store) as store:
        for number, objective in enumerate(OBJECTIVES, 5):
            odd = (planted.ALARMS[Anomaly.EXPLAINED_VARIANCE],) if number in (6, 9) else ()
            record_iteration(
                store,
                planted.iteration(number, 12, objective=objective, probe=0.6, anomalies=odd, kl=0.001 * number),
                {},
            )
    return made.path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = grown(tmp_path_factory.mktemp("alone") / "run")
    with RunStore.open(made.store) as store:
        for epoch in (2, 3):
            figures = {"train_accuracy": 0.5 + epoch / 20, "validation_accuracy": 0.4, "train_loss": 1 / epoch}
            store.record_scalars(epoch, {**figures, "validation_loss": 1.3 / epoch, "added_parameters": 12 * epoch})
        store.emit(EXPLODED)
    return made.path


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a model that grew in its owner's loop, with a rollback."""
    path = tmp_path_factory.mktemp("own") / "run"
    loop = Loop("heuristic", run=path)
    for number in range(1, 11):
        loop.epoch(lambda loss, number=number: math.nan if number == 9 else loss)
    return path


def select(run: Path, sql: str) -> list[Record]:
    with closing(sqlite3.connect(f"file:{run}/run.db?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql)]


def series(found: Sequence[Record], x: str, y: str, *by: str) -> Counter[Curve]:
    """Curves by the values of ``by``; without points of which either is missing."""
    parts: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for one in found:
        if one[x] is not None and one[y] is not None:
            parts.setdefault(tuple(one[name] for name in by), []).append((one[x], one[y]))
    return Counter(tuple(part) for part in parts.values())


def finite(points: Iterable[tuple[float, float]]) -> Curve:
    return tuple((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


# Pages ----------------------------------------------------------------------------------------------------------------


def shown_on(page: str) -> list[tuple[str, str, str, str]]:
    """Of each figure and table with a query: its folder and name, its markup, and the query."""
    found = []
    for kind, name, markup in re.findall(r'<figure id="(figure|table)-(\w+)"(.*?)</figure>', page, re.DOTALL):
        if Query.title in markup:
            code = re.search(r"<code>(.*?)</code>", markup, re.DOTALL)
            found.append((f"{kind}s", name, markup, html.unescape(code[1])))
    return found


def cells(markup: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", markup, re.DOTALL)[1:]
    return [[html.unescape(text) for text in re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)] for row in rows]


@pytest.mark.parametrize(("which", "least"), [("run", 3), ("alone", 6), ("own", 6)])
def test_pages_show_what_their_queries_return(which: str, least: int, request: pytest.FixtureRequest) -> None:
    """What a page shows is what its figures draw, and its tables write, of what is queried anew."""
    path: Path = request.getfixturevalue(which)
    report = report_on([path])
    known = {(what.folder, what.name): what for what in report.exhibits}
    shown = shown_on(report.render())
    assert len(shown) >= least
    for folder, name, markup, sql in shown:
        found, what = select(path, sql), known[folder, name]
        assert what.source.text == sql
        if isinstance(what, Drawing):
            # One that takes the whole width is drawn for it.
            drawn = [draw_svg(replace(what, rows=found, columns=columns)) for columns in (what.columns, 2)]
            assert any(one in markup for one in drawn)
        else:
            columns = replace(what, rows=found).shown_columns
            assert cells(markup) == [[column.cell(one).text for column in columns] for one in found]


# Files ----------------------------------------------------------------------------------------------------------------


Calls = dict[str, list[tuple[Any, ...]]]
"""The calls of matplotlib, by method."""
METHODS = (*("plot", "text", "barh", "axhline", "axvline"), *("set_title", "set_xlabel", "add_patch"))


def plotted(calls: Calls) -> Counter[Curve]:
    return Counter(finite(zip(*args[:2], strict=True)) for args in calls["plot"])


def lines(x: str, y: str, *by: str) -> Callable[[Calls, list[Record]], None]:
    def check(calls: Calls, found: list[Record]) -> None:
        assert plotted(calls) == series(found, x, y, *by)

    return check


def learning_lines(calls: Calls, found: list[Record]) -> None:
    assert plotted(calls) == series(found, "iteration", "value", "kind")
    assert [args[0] for args in calls["axhline"]] == [one["value"] for one in found if one["kind"] == "baseline"]


def measures(calls: Calls, found: list[Record]) -> None:
    assert plotted(calls) == series(found, "decision", "value", "measure", "data")
    rollbacks = {one["decision"] for one in found if one["measure"] == "rollback"}
    assert {args[0] for args in calls["axvline"]} == rollbacks != set()


def stage_lanes(calls: Calls, found: list[Record]) -> None:
    slots = list(dict.fromkeys(one["slot_name"] for one in found))
    bars = [
        (place, start + 0.5 + number)
        for place, width, _, start in (args for args in calls["barh"] if len(args) == 4)
        for number in range(round(width))
    ]
    shown = [(slots.index(one["slot_name"]), one["decision"]) for one in found if one["stage"] != "dormant"]
    assert Counter(bars) == Counter(shown)


def snapshots(calls: Calls, found: list[Record]) -> None:
    moments = list({one["decision"]: one for one in found}.values())
    slots = list(dict.fromkeys(one["slot_name"] for one in found))
    assert len(moments) <= MOMENTS
    assert [(args[0], args[-1]) for args in calls["set_title"]] == [
        (f"decision {one['decision']}", column) for column, one in enumerate(moments)
    ], "from left to right"
    assert [args[0] for args in calls["set_xlabel"]] == [
        f"{one['measure']} {measure(one['value'])}\n{signed_percent(one['added'])} parameters" for one in moments
    ]
    living = [one for one in found if one["blueprint"] is not None]
    pruned = [one for one in found if one["blueprint"] is None and one["pruned"]]
    assert living
    assert pruned
    assert Counter((round(args[1]), args[2]) for args in calls["text"]) == Counter(
        (slots.index(one["slot_name"]), text)
        for group, texts in (
            (living, lambda one: [one["blueprint"]]),
            ([one for one in living if one["contribution"] is not None], lambda one: [difference(one["contribution"])]),
            (pruned, lambda one: [f"\N{MULTIPLICATION SIGN} {one['pruned']}"]),
        )
        for one in group
        for text in texts(one)
    ), "each in the row of its slot"
    boxes = [patch for (patch,) in calls["add_patch"] if patch.get_fill()]
    filled = [box for box in boxes if box.get_x() > 0.2]
    assert Counter((round(box.get_width() / 0.7, 3), to_hex(box.get_facecolor())) for box in filled) == Counter(
        (round(max(one["alpha"], 0.05), 3), to_hex(STAGE_STYLES[Stage[one["stage"].upper()]].colour)) for one in living
    )
    assert len(boxes) == len(living) + len(found), "and a box for each of the host's layers"


def gauges(calls: Calls, found: list[Record]) -> None:
    figures = [one for one in found if one["kind"] == "figure"]
    assert plotted(calls) == series(figures, "iteration", "value", "name")
    anomalies = [one["iteration"] for one in found if one["kind"] == "anomaly"]
    gauges = len({one["name"] for one in figures})
    assert Counter(args[0] for args in calls["axvline"]) == Counter(anomalies * gauges) != Counter()


IN_FILES: dict[str, Callable[[Calls, list[Record]], None]] = {
    "learning": learning_lines,
    "health": gauges,
    "curves": measures,
    "stages": stage_lanes,
    "snapshots": snapshots,
    "contributions": lines("decision", "contribution", "slot_name"),
}
"""How what each figure draws is read back."""
REGISTRY = {
    "learning": (LEARNING, "run"),
    "health": (health_figure(0.03), "run"),
    **{
        one.name: (one, "own" if one.name == "snapshots" else "alone")
        for one in grown_exhibits({})
        if isinstance(one, Drawing)
    },
}


@pytest.mark.parametrize("name", REGISTRY)
def test_figures_draw_what_their_queries_return(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure, which = REGISTRY[name]
    path: Path = request.getfixturevalue(which)
    calls: Calls = {method: [] for method in METHODS}

    def spy(method: str) -> None:
        real = getattr(Axes, method)

        def spied(self: Any, *args: Any, **options: Any) -> Any:
            left = [options["left"]] if isinstance(options.get("left"), float) else []
            column = [self.get_subplotspec().colspan.start] if method == "set_title" else []
            calls[method].append((*args, *left, *column))
            return real(self, *args, **options)

        monkeypatch.setattr(Axes, method, spied)

    for method in METHODS:
        spy(method)
    canvas = Canvas()
    (drawn,) = run_queries(path / "run.db", [figure])
    figure.draw(canvas, drawn.rows)
    found = select(path, figure.source.text)
    assert found
    IN_FILES[name](calls, found)


def test_one_smoothing_in_terminal_report_and_figures(run: Path) -> None:
    found = select(run, LEARNING.source.text)
    raw, mean = ([one["value"] for one in found if one["kind"] == kind] for kind in ("J", "smoothed"))
    assert mean == pytest.approx(moving_average(raw))
    with RunReader.open(run / "run.db") as reader:
        assert describe_learning(reader)["series"]["objective"] == raw
