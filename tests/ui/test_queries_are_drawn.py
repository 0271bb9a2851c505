"""What the query beside a figure returns is what the figure draws: every figure with a query, on pages and in files.

The SQL is taken from where readers find it, asked through `esper query`, and compared with the numbers that the drawing
was given, exactly.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.cli import main
from esper.experiments.iteration import record
from esper.telemetry.events import RolledBack
from esper.telemetry.reader import RunReader
from esper.telemetry.store import RunStore
from esper.ui.course import smoothed
from esper.ui.dash.queries.learning import learning
from esper.ui.figures import growing
from esper.ui.figures import grown as grown_figures
from esper.ui.figures import learning as learning_figures
from esper.ui.figures.grown_tables import TABLES
from esper.ui.figures.health import HEALTH
from esper.ui.figures.record import Table, measured
from esper.ui.report.plot import Plot
from esper.ui.report.subject import report_on
from grower.training_loop import Loop
from ui import planted
from ui.figures_cases import grown, trained

Record = dict[str, Any]
Curve = tuple[tuple[float, float], ...]
OBJECTIVES = [0.4, 0.7, 0.5, 0.66, 0.61, 0.58, 0.72, 0.69]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose J goes up and down for longer than it is smoothed over."""
    made = trained(tmp_path_factory.mktemp("drawn") / "run")
    with RunStore.open(made.store) as store:
        for number, objective in enumerate(OBJECTIVES, 5):
            record(store, planted.iteration(number, 12, objective=objective, probe=0.6, kl=0.001 * number), {})
    return made.path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = grown(tmp_path_factory.mktemp("alone") / "run")
    with RunStore.open(made.store) as store:
        for epoch in (2, 3):
            figures = {"train_accuracy": 0.5 + epoch / 20, "validation_accuracy": 0.4, "train_loss": 1 / epoch}
            store.scalars(epoch, {**figures, "validation_loss": 1.3 / epoch, "added_parameters": 12 * epoch})
        store.emit(RolledBack(1, 1, 0, 0, "exploded", 9.0, 0.1, 1.0, float("nan"), (0,), False))
    return made.path


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a model that grew in its owner's loop, with a rollback."""
    path = tmp_path_factory.mktemp("own") / "run"
    loop = Loop("heuristic", run=path)
    for number in range(1, 11):
        loop.epoch(lambda loss, number=number: math.nan if number == 9 else loss)
    return path


def asked(run: Path, sql: str, capsys: pytest.CaptureFixture[str]) -> list[Record]:
    capsys.readouterr()
    assert main(["query", str(run), sql, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


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


def figures_of(page: str) -> list[tuple[str, str]]:
    """Of each figure with a query: its markup, and the query."""
    found = []
    for markup in re.findall(r"<figure>.*?</figure>", page, re.DOTALL):
        if "The query behind it" in markup:
            code = re.search(r"<code>(.*?)</code>", markup, re.DOTALL)
            assert code is not None
            found.append((markup, html.unescape(code[1])))
    return found


def titled(markup: str, pattern: str) -> list[tuple[str, ...]]:
    return re.findall(rf"<title>{pattern}</title>", markup)


def bars(markup: str, found: list[Record]) -> None:
    drawn = titled(markup, r"([^<]*): (\d+) (\w+)")
    assert drawn == [(one["blueprint"], str(one["seeds"]), one["outcome"]) for one in found]


def areas(markup: str, found: list[Record]) -> None:
    """Each band's height is the share, in pixels of a plot from 0 to 1."""
    for polygon, name in re.findall(r'<polygon[^>]*points="([^"]*)"[^>]*><title>([^<]*)</title>', markup):
        downs = [float(point.split(",")[1]) for point in polygon.split()]
        half = len(downs) // 2
        heights = np.array(downs[half:][::-1]) - np.array(downs[:half])
        shares = [one["share"] for one in found if one["operation"] == name]
        assert heights == pytest.approx(np.array(shares) * 160, abs=0.03)
    assert len(re.findall("<polygon", markup)) == len({one["operation"] for one in found})


def changes(markup: str, found: list[Record]) -> None:
    drawn = {(stage, int(start)) for stage, start in titled(markup, r"(\w+)[^<]*: decisions (\d+) to \d+")}
    joined = ("dormant", "embargoed", "resetting")  # a cooldown is one bar, from its beginning
    assert drawn == {(one["after"], one["step"]) for one in found if one["after"] not in joined}


def health(markup: str, found: list[Record]) -> Counter[Curve]:
    ticks = titled(markup, r"iteration (\d+): (\w+)")
    gauges = markup.count("<h4>")
    anomalies = [(str(one["iteration"]), one["name"]) for one in found if one["kind"] == "anomaly"]
    assert Counter(ticks) == Counter(anomalies * gauges)
    return series([one for one in found if one["kind"] == "figure"], "iteration", "value", "name")


def levels(markup: str, found: list[Record]) -> Counter[Curve]:
    words = {(one["name"], f"{one['value']:.3f}") for one in found if one["kind"] == "baseline"}
    assert {tuple(text.rsplit(" ", 1)) for text in re.findall(r'class="label start">([^<]*)<', markup)} == words
    return series(found, "iteration", "value", "kind")


def curves_of(x: str, y: str, *by: str) -> Callable[[str, list[Record]], Counter[Curve]]:
    return lambda _, found: series(found, x, y, *by)


Check = Callable[[str, list[Record]], Counter[Curve] | None]


def cells_of(table: Table) -> Check:
    def check(markup: str, found: list[Record]) -> None:
        rows = [
            re.findall(r'<td(?: class="long")?>([^<]*)</td>', row)
            for row in re.findall(r"<tr>(.*?)</tr>", markup, re.DOTALL)
        ]
        written = [[html.escape(column.written(one[column.name])) for column in table.columns] for one in found]
        assert [row for row in rows if row] == written

    return check


ON_PAGES: dict[str, Check] = {
    learning_figures.LEARNING.text: levels,
    learning_figures.OPERATIONS.text: areas,
    growing.SEEDS.text: bars,
    growing.REWARDS.text: curves_of("iteration", "paid_per_episode", "term"),
    HEALTH.text: health,
    grown_figures.CURVES.text: curves_of("decision", "value", "measure", "data"),
    grown_figures.CHANGES.text: changes,
    grown_figures.CONTRIBUTIONS.text: curves_of("decision", "contribution", "slot_name"),
    **{one.source.text: cells_of(one) for one in TABLES},
}
"""How each page's figures and tables are read back, by their query."""


@pytest.mark.parametrize(("which", "least"), [("run", 5), ("alone", 6), ("own", 6)])
def test_pages_draw_what_their_queries_return(
    which: str,
    least: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path: Path = request.getfixturevalue(which)
    drawn: list[Curve] = []
    curve = Plot.curve

    def spied(self: Plot, points: Sequence[tuple[float, float]], kind: str) -> Any:
        drawn.append(finite(points))
        return curve(self, points, kind)

    monkeypatch.setattr(Plot, "curve", spied)
    figures = figures_of(report_on(path).html)
    assert len(figures) >= least
    returned: Counter[Curve] = Counter()
    for markup, sql in figures:
        returned += ON_PAGES[sql](markup, asked(path, sql, capsys)) or Counter()
    assert Counter(drawn) == returned


# Files ----------------------------------------------------------------------------------------------------------------


Calls = dict[str, list[tuple[Any, ...]]]
"""What matplotlib was told to draw, by method."""
METHODS = ("plot", "scatter", "hlines", "barh", "stackplot", "axhline", "axvline")


def plotted(calls: Calls, method: str = "plot") -> Counter[Curve]:
    return Counter(finite(zip(*args[:2], strict=True)) for args in calls[method])


def lines(x: str, y: str, *by: str) -> Callable[[Calls, list[Record]], None]:
    def check(calls: Calls, found: list[Record]) -> None:
        assert plotted(calls) == series(found, x, y, *by)

    return check


def learning_lines(calls: Calls, found: list[Record]) -> None:
    assert plotted(calls) == series(found, "iteration", "value", "kind")
    assert [args[0] for args in calls["axhline"]] == [one["value"] for one in found if one["kind"] == "baseline"]


def update_lines(calls: Calls, found: list[Record]) -> None:
    names = ("kl", "clip_fraction", "explained_variance")
    assert plotted(calls) == sum((series(found, "iteration", name) for name in names), Counter[Curve]())


def stacked(calls: Calls, found: list[Record]) -> None:
    ((x, *heights),) = calls["stackplot"]
    assert Counter(finite(zip(x, y, strict=True)) for y in heights) == series(found, "iteration", "share", "operation")


def counted(calls: Calls, found: list[Record]) -> None:
    names = list(dict.fromkeys(one["blueprint"] for one in found))
    bars = [bar for places, counts, *_ in calls["barh"] for bar in zip(places, counts, strict=True)]
    assert Counter(bars) == Counter((names.index(one["blueprint"]), one["seeds"]) for one in found)


def quantiles(calls: Calls, found: list[Record]) -> None:
    for one in found:
        names = ("tenth", "quarter", "median", "three_quarters", "nine_tenths")
        assert len({one[name] for name in names}) == len(names), "figures that are equal could stand for each other"
    ranges = [pair for _, low, high in calls["hlines"] for pair in zip(low, high, strict=True)]
    assert Counter(ranges) == Counter(
        (one[low], one[high])
        for one in found
        for low, high in (("tenth", "nine_tenths"), ("quarter", "three_quarters"))
    )
    assert Counter(x for values, _ in calls["scatter"] for x in values) == Counter(one["median"] for one in found)


def dots(calls: Calls, found: list[Record]) -> None:
    assert plotted(calls, "scatter") == series(found, "added", "accuracy", "family")


def measures(calls: Calls, found: list[Record]) -> None:
    assert plotted(calls) == series(found, "decision", "value", "measure", "data")
    rollbacks = {one["decision"] for one in found if one["measure"] == "rollback"}
    assert {args[0] for args in calls["axvline"]} == rollbacks != set()


def stage_lanes(calls: Calls, found: list[Record]) -> None:
    slots = list(dict.fromkeys(one["slot_name"] for one in found))
    bars = [(place, left + 0.5) for place, width, _, left in (args for args in calls["barh"] if len(args) == 4)]
    shown = [(slots.index(one["slot_name"]), one["decision"]) for one in found if one["stage"] != "dormant"]
    assert Counter(bars) == Counter(shown)


IN_FILES: dict[str, Callable[[Calls, list[Record]], None]] = {
    "learning": learning_lines,
    "entropies": lines("iteration", "entropy", "head"),
    "updates": update_lines,
    "operations": stacked,
    "seeds": counted,
    "contributions": quantiles,
    "growth": dots,
    "rewards": lines("iteration", "paid_per_episode", "term"),
    "curves": measures,
    "stages": stage_lanes,
    "grown contributions": lines("decision", "contribution", "slot_name"),
}
"""How what each figure draws is read back."""
REGISTRY = {
    **{one.name: (one, "run") for one in (*learning_figures.FIGURES, *growing.FIGURES)},
    **{
        ("grown contributions" if one.name == "contributions" else one.name): (one, "alone")
        for one in grown_figures.FIGURES
    },
}


@pytest.mark.parametrize("name", REGISTRY)
def test_figures_draw_what_their_queries_return(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure, which = REGISTRY[name]
    path: Path = request.getfixturevalue(which)
    axes = pytest.importorskip("matplotlib.axes").Axes
    calls: Calls = {method: [] for method in METHODS}

    def spy(method: str) -> None:
        real = getattr(axes, method)

        def spied(self: Any, *args: Any, **options: Any) -> Any:
            calls[method].append((*args, *([options["left"]] if isinstance(options.get("left"), float) else [])))
            return real(self, *args, **options)

        monkeypatch.setattr(axes, method, spied)

    for method in METHODS:
        spy(method)
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    figure.draw(canvas, next(rows for what, rows in measured(path / "run.db", [figure]) if what is figure))
    found = asked(path, figure.source.text, capsys)
    assert found
    IN_FILES[name](calls, found)


def test_one_smoothing_in_terminal_report_and_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run, learning_figures.LEARNING.text, capsys)
    raw, mean = ([one["value"] for one in found if one["kind"] == kind] for kind in ("J", "smoothed"))
    assert mean == pytest.approx(smoothed(raw))
    with RunReader.open(run / "run.db") as reader:
        assert learning(reader)["series"]["objective"] == raw
