"""Whether training was healthy: small plots of what tells a healthy training from an ill one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from esper.rl.ppo import KL_STOP
from esper.ui.figures.learning import NO_ITERATION
from esper.ui.figures.marks import BLUE, GREY, LABEL_SIZE, SOFT, VERMILION, count_iterations, few_ticks
from esper.ui.figures.record import Exhibit, Figure, Query
from esper.ui.figures.rows import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

KL = "ppo/kl"
_ACROSS = 3


@dataclass(frozen=True)
class Gauge:
    """A small plot of one figure over training."""

    name: str
    series: str
    meaning: str
    levels: tuple[float, ...] = ()
    """To compare with."""


GAUGES = (
    Gauge("entropy", "ppo/entropy", "1: the policy decides at random\n0: it no longer explores"),
    Gauge("operation's entropy", "ppo/head_entropy/op", "the same of the choice\nof operation alone"),
    Gauge("KL divergence", KL, "moved per update\ndashed: where an update ends early"),
    Gauge("explained variance", "ppo/explained_variance", "1: the value function\nforesees the returns", (0.0,)),
    Gauge("clipped share", "ppo/clip_fraction", "decisions whose probability\nleft the clip range"),
    Gauge("gradient norm", "ppo/gradient_norm", "before it is clipped"),
    Gauge("accuracy", "accuracy", "validation, at the end\nof the episodes"),
    Gauge("growth", "added", "committed parameters\nover the host's"),
    Gauge("deciding to wait", "operations/wait", "share of decisions"),
)
HEALTH = Query(
    f"""\
SELECT 'figure' AS kind, name, iteration, value FROM scalars
WHERE name IN ({", ".join(f"'{gauge.series}'" for gauge in GAUGES)})
UNION ALL
SELECT 'anomaly', anomalies.value, iteration, NULL FROM ppo, json_each(ppo.anomalies) AS anomalies
ORDER BY kind DESC, name, iteration
"""
)


def exhibit_health(rows: Rows, target_kl: float, rollbacks: Mapping[str, int]) -> Exhibit:
    """Of what `HEALTH` gives; ``rollbacks`` says how often the governor stepped in, by what the trouble was."""
    anomalies = rows.by("kind").get("anomaly")
    caption = f"{_told_anomalies(anomalies)} {_told_rollbacks(rollbacks)}"
    draw = partial(_draw_health, KL_STOP * target_kl)
    return Figure("health", caption, HEALTH, draw, NO_ITERATION, height=5, columns=2), rows


def _told_anomalies(anomalies: Rows | None) -> str:
    if anomalies is None:
        return "Figures of the policy's updates, by iteration. No anomaly was seen."
    counts = [f"{name} ({count})" for name, count in sorted(Counter(anomalies.texts("name")).items())]
    return (
        "Figures of the policy's updates, by iteration; ticks at the bottom mark iterations with an anomaly: "
        f"{', '.join(counts)}."
    )


def _told_rollbacks(counts: Mapping[str, int]) -> str:
    if not counts:
        return "No network blew up."
    kinds = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(counts.items()))
    times = sum(counts.values())
    return f"The governor returned networks that blew up to their last good state, {times} times in all ({kinds})."


def _draw_health(kl_stop: float, canvas: Canvas, rows: Rows) -> None:
    parts = rows.by("kind")
    series = parts["figure"].by("name") if "figure" in parts else {}
    anomalies = parts["anomaly"].numbers("iteration") if "anomaly" in parts else []
    gauges = [gauge for gauge in GAUGES if gauge.series in series]
    grid = canvas.subplots(-(-len(GAUGES) // _ACROSS), _ACROSS, sharex=True).flat
    for axes, gauge in zip(grid, gauges, strict=False):
        levels = (kl_stop,) if gauge.series == KL else gauge.levels
        _draw_gauge(axes, gauge, series[gauge.series], levels)
        for iteration in anomalies:
            axes.axvline(iteration, ymax=0.08, color=VERMILION, linewidth=1.2)
    for axes in list(canvas.axes)[len(gauges) :]:
        axes.set_axis_off()


def _draw_gauge(axes: Axes, gauge: Gauge, rows: Rows, levels: tuple[float, ...]) -> None:
    for level in levels:
        axes.axhline(level, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.plot(rows.numbers("iteration"), rows.numbers("value"), color=BLUE)
    axes.set_title(gauge.name, fontweight="bold", pad=18)
    axes.text(0, 1.05, gauge.meaning, transform=axes.transAxes, color=SOFT, fontsize=LABEL_SIZE - 0.5)
    few_ticks(axes, 4)
    count_iterations(axes, "")
