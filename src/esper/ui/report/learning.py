"""How the policy learned: its score against the baselines' levels, and the health of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from esper.rl.ppo import KL_STOP
from esper.ui.figures.health import GAUGES, HEALTH, KL, Gauge
from esper.ui.figures.learning import LEARNING
from esper.ui.figures.rows import Rows
from esper.ui.formats import score
from esper.ui.labels import spread_apart
from esper.ui.report.axes import Axis, axis_for, counting_axis
from esper.ui.report.data import ReportData
from esper.ui.report.layout import figure, legend, section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, across, text

CURVE_HEIGHT = 280
SMALL_HEIGHT = 110
LABEL_GAP = 15
"""Pixels between the baselines' labels."""
LABEL_ROOM = 128
_Anomaly = tuple[float, str]
"""Iteration and name."""


_KINDS = {"J": "raw", "smoothed": "objective", "probe": "policy"}
"""Classes of the curves, by the kind that the query gives, in the order in which they are drawn."""


def learning_section(data: ReportData) -> Element:
    """The learning curve."""
    title, parts = "How the policy learned", data.rows[LEARNING].by("kind")
    if "J" not in parts:
        return section(title, element("p", "The run has no finished iteration yet."))
    caption = (
        "Score of the greedy policy on fixed training problems, on test data, against what the baselines score on "
        "the very same problems (dashed). J is the score of the policy while it explores, on other problems in every "
        "iteration and on validation data, so it compares with the dashed levels only roughly."
    )
    known = [(parts[kind].texts("name")[0], f"swatch {mark}") for kind, mark in _KINDS.items() if kind in parts]
    return section(title, figure(_curve(data, parts), caption, legend(known), source=LEARNING))


def _curve(data: ReportData, parts: Mapping[str, Rows]) -> Element:
    levels = _by_name(parts["baseline"]) if "baseline" in parts else {}
    values = data.rows[LEARNING].numbers("value")
    plot = Plot(_iterations(data), axis_for(values), CURVE_HEIGHT, right=LABEL_ROOM if levels else 12)
    curves = {kind: _points(parts[kind]) for kind in _KINDS if kind in parts}
    marks: list[Node] = [*_levels(plot, levels)]
    marks += [plot.curve(points, _KINDS[kind]) for kind, points in curves.items()]
    marks += [
        plot.dot(step, value, "policy", f"iteration {step:.0f}: greedy policy {score(value)}")
        for step, value in curves.get("probe", [])
    ]
    return plot.figure(*marks, title="Score over training iterations", x_title="iteration")


def _points(rows: Rows) -> list[tuple[float, float]]:
    return list(zip(rows.numbers("iteration"), rows.numbers("value"), strict=True))


def _by_name(rows: Rows) -> dict[str, float]:
    return dict(zip(rows.texts("name"), rows.numbers("value"), strict=True))


def _levels(plot: Plot, levels: Mapping[str, float]) -> list[Node]:
    """Dashed lines with their names beside them, which make room for each other."""
    marks: list[Node] = []
    places = [plot.down(value) for value in levels.values()]
    labels = spread_apart(places, LABEL_GAP, 0, plot.height)
    for (name, value), place, label in zip(levels.items(), places, labels, strict=True):
        marks.append(across("0%", "100%", place, "baseline"))
        marks.append(element("svg", _leader(place, label), x="100%", y=0, width=12, height=plot.height))
        marks.append(element("svg", text("14", label + 4, f"{name} {score(value)}", "label start"), x="100%"))
    return marks


def _leader(start: float, end: float) -> Element:
    return element("line", x1=0, x2=11, y1=start, y2=end, class_="leader")


def _iterations(data: ReportData) -> Axis:
    return counting_axis(max(data.summary.iterations, 1))


def health_section(data: ReportData) -> Element | None:
    """Small plots of what tells a healthy training from an ill one; None before the first iteration."""
    parts = data.rows[HEALTH].by("kind")
    if "figure" not in parts:
        return None
    series = parts["figure"].by("name")
    anomalies: list[_Anomaly] = []
    if found := parts.get("anomaly"):
        anomalies = list(zip(found.numbers("iteration"), found.texts("name"), strict=True))
    drawn = [_gauge(data, gauge, series[gauge.series], anomalies) for gauge in GAUGES if gauge.series in series]
    caption = f"{_health_caption(anomalies)} {_rollbacks(data.rollbacks)}"
    return section("Was training healthy?", figure(element("div", *drawn, class_="gauges"), caption, source=HEALTH))


def _health_caption(anomalies: Sequence[_Anomaly]) -> str:
    if not anomalies:
        return "Figures of the policy's updates, by iteration. No anomaly was seen."
    names = sorted({name for _, name in anomalies})
    counts = [f"{name} ({sum(found == name for _, found in anomalies)})" for name in names]
    return (
        "Figures of the policy's updates, by iteration; ticks at the bottom mark iterations with an anomaly: "
        f"{', '.join(counts)}."
    )


def _rollbacks(counts: Mapping[str, int]) -> str:
    if not counts:
        return "No network blew up."
    kinds = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(counts.items()))
    times = sum(counts.values())
    return f"The governor returned networks that blew up to their last good state, {times} times in all ({kinds})."


def _gauge(data: ReportData, gauge: Gauge, rows: Rows, anomalies: Sequence[_Anomaly]) -> Element:
    levels = (KL_STOP * data.settings.ppo.target_kl,) if gauge.series == KL else gauge.marks
    plot = Plot(_iterations(data), axis_for([*rows.numbers("value"), *levels], 4), SMALL_HEIGHT)
    marks: list[Node] = [plot.level(level, "baseline") for level in levels]
    marks.append(plot.curve(_points(rows), "policy"))
    marks += [
        element("line", element("title", f"iteration {step:.0f}: {name}"), class_="anomaly", **_tick(plot, step))
        for step, name in anomalies
    ]
    drawn = plot.figure(*marks, title=f"{gauge.name} over training iterations")
    return element("div", element("h4", gauge.name), element("p", gauge.meaning, class_="note"), drawn)


def _tick(plot: Plot, step: float) -> dict[str, str | float]:
    place = plot.across(step)
    return {"x1": place, "x2": place, "y1": plot.height - 5, "y2": plot.height + 5}
