"""How the policy learned: its score against the baselines' levels, and the health of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper.rl.ppo import KL_STOP
from esper.ui.course import smoothed
from esper.ui.figures.learning import LEARNING
from esper.ui.figures.record import Query
from esper.ui.formats import score
from esper.ui.labels import spread_apart
from esper.ui.report.axes import Axis, axis_for, counting_axis
from esper.ui.report.data import ReportData, Series
from esper.ui.report.layout import figure, legend, section
from esper.ui.report.markup import Element, Node, element
from esper.ui.report.plot import Plot, across, text

CURVE_HEIGHT = 280
SMALL_HEIGHT = 110
LABEL_GAP = 15
"""Pixels between the baselines' labels."""
LABEL_ROOM = 128


def learning_section(data: ReportData) -> Element:
    """The learning curve."""
    title = "How the policy learned"
    if not data.series.get("objective"):
        return section(title, element("p", "The run has no finished iteration yet."))
    caption = (
        "Score of the greedy policy on fixed training problems, on test data, against what the baselines score on "
        "the very same problems (dashed). J is the score of the policy while it explores, on other problems in every "
        "iteration and on validation data, so it compares with the dashed levels only roughly."
    )
    entries = [("J, smoothed", "swatch objective"), ("J per iteration", "swatch raw")]
    if data.series.get("probe_score"):
        entries.insert(0, ("greedy policy", "swatch policy"))
    return section(title, figure(_curve(data), caption, legend(entries), source=LEARNING))


def _curve(data: ReportData) -> Element:
    raw = data.series["objective"]
    smooth = [(step, value) for (step, _), value in zip(raw, smoothed(value for _, value in raw), strict=True)]
    probes = data.series.get("probe_score", [])
    levels = data.summary.baselines
    values = [value for _, value in [*raw, *probes]] + list(levels.values())
    plot = Plot(_iterations(data), axis_for(values), CURVE_HEIGHT, right=LABEL_ROOM if levels else 12)
    marks: list[Node] = [*_levels(plot, levels)]
    marks += [plot.curve(raw, "raw"), plot.curve(smooth, "objective"), plot.curve(probes, "policy")]
    marks += [
        plot.dot(step, value, "policy", f"iteration {step:.0f}: greedy policy {score(value)}") for step, value in probes
    ]
    return plot.figure(*marks, title="Score over training iterations", x_title="iteration")


def _levels(plot: Plot, levels: dict[str, float]) -> list[Node]:
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


@dataclass(frozen=True)
class Gauge:
    """A small plot of one figure over training."""

    name: str
    series: str
    meaning: str
    marks: tuple[float, ...] = ()
    """Levels to compare with."""


def health_section(data: ReportData) -> Element | None:
    """Small plots of what tells a healthy training from an ill one; None before the first iteration."""
    if not data.series.get("objective"):
        return None
    target = data.settings.ppo.target_kl
    gauges = [
        Gauge("entropy", "ppo/entropy", "1: the policy decides at random; 0: it no longer explores"),
        Gauge("operation's entropy", "ppo/head_entropy/op", "the same of the choice of operation alone"),
        Gauge("KL divergence", "ppo/kl", "moved per update; dashed: where an update ends early", (KL_STOP * target,)),
        Gauge("explained variance", "ppo/explained_variance", "1: the value function foresees the returns", (0.0,)),
        Gauge("clipped share", "ppo/clip_fraction", "decisions whose probability left the clip range"),
        Gauge("gradient norm", "ppo/gradient_norm", "before it is clipped"),
        Gauge("accuracy", "accuracy", "validation, at the end of the episodes"),
        Gauge("growth", "added", "committed parameters over the host's"),
        Gauge("deciding to wait", "operations/wait", "share of decisions"),
    ]
    drawn = [_gauge(data, gauge) for gauge in gauges if data.series.get(gauge.series)]
    caption = f"{_health_caption(data.anomalies)} {_rollbacks(data.rollbacks)}"
    source = _health_source([gauge.series for gauge in gauges])
    return section("Was training healthy?", figure(element("div", *drawn, class_="gauges"), caption, source=source))


def _health_source(series: Sequence[str]) -> Query:
    names = ", ".join(f"'{name}'" for name in series)
    return Query(
        f"""\
SELECT name, iteration, value FROM scalars WHERE name IN ({names})
UNION ALL
SELECT 'anomaly', iteration, anomalies FROM ppo WHERE json_array_length(anomalies)
ORDER BY name, iteration
"""
    )


def _health_caption(anomalies: Sequence[tuple[int, str]]) -> str:
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


def _gauge(data: ReportData, gauge: Gauge) -> Element:
    points: Series = data.series[gauge.series]
    values = [value for _, value in points]
    plot = Plot(_iterations(data), axis_for([*values, *gauge.marks], 4), SMALL_HEIGHT)
    marks: list[Node] = [plot.level(mark, "baseline") for mark in gauge.marks]
    marks.append(plot.curve(points, "policy"))
    marks += [
        element("line", element("title", f"iteration {step}: {name}"), class_="anomaly", **_tick(plot, step))
        for step, name in data.anomalies
    ]
    drawn = plot.figure(*marks, title=f"{gauge.name} over training iterations")
    return element("div", element("h4", gauge.name), element("p", gauge.meaning, class_="note"), drawn)


def _tick(plot: Plot, step: int) -> dict[str, str | float]:
    place = plot.across(step)
    return {"x1": place, "x2": place, "y1": plot.height - 5, "y2": plot.height + 5}
