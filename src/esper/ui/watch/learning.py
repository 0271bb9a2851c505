"""How learning goes: the curves of a run and what they are measured against."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from esper.experiments.trainer import LEVELS
from esper.telemetry.events import AnomalyRaised
from esper.ui.listing import listing, printable
from esper.ui.panel import POLICY, sparkline
from esper.ui.watch.known import Known, Points
from esper.ui.watch.queries import curves
from esper.ui.watch.words import amount, event_line, figure

ANOMALIES = 10
"""That are listed."""
_NAMES = {
    "objective": "J, exploring",
    "probe_score": POLICY,
    "ppo/kl": "KL",
    "ppo/clip_fraction": "clip fraction",
    "ppo/entropy": "entropy",
    "ppo/explained_variance": "explained variance",
}
_BESIDE_CURVE = 32
_BESIDE_BAR = 34


class Learning(VerticalScroll, can_focus=True):
    """A line per figure, the score among the baselines', and recent anomalies."""

    def compose(self) -> ComposeResult:
        """One drawing."""
        yield Static(id="learning-body")

    def show(self, known: Known) -> None:
        """Draw what is known now."""
        self.query_one("#learning-body", Static).update(self._body(known))

    def _body(self, known: Known) -> RenderableType:
        parts = [self._curves(known)]
        levels = _levels(known)
        if levels:
            parts += [Text(), Text("score on the same problems", "bold"), self._bars(levels)]
        anomalies = known.events([AnomalyRaised.name])[:ANOMALIES]
        if anomalies:
            parts += [Text(), Text("anomalies, the newest first", "bold")]
            parts += [Text(event_line(one, known.slot), "yellow") for one in anomalies]
        return Group(*parts)

    def _curves(self, known: Known) -> RenderableType:
        width = max(self.size.width - _BESIDE_CURVE, 8)
        table = listing("figure", "now", "by iteration")
        for name in curves(known.metadata):
            points = _finite(known.curves.get(name, []))
            now = amount(points[-1]) if points else "-"
            label = _NAMES.get(name, printable(name.replace("_", " ")))
            table.add_row(Text(label), now, Text(sparkline(points, width) if points else "", "cyan", no_wrap=True))
        return table

    def _bars(self, levels: list[tuple[str, float]]) -> RenderableType:
        table = listing("controller", "score", "")
        low, high = levels[-1][1], levels[0][1]
        width = max(self.size.width - _BESIDE_BAR, 8)
        for name, level in levels:
            place = round((level - low) / ((high - low) or 1.0) * (width - 1))
            style = "bold cyan" if name == POLICY else ""
            table.add_row(Text(printable(name), style), figure(level), Text("─" * place + "●", style, no_wrap=True))
        return table


def _levels(known: Known) -> list[tuple[str, float]]:
    """The baselines' and the policy's scores, the best first."""
    levels: dict[str, float] = dict(known.metadata.get(LEVELS, {}))
    probes = known.curves.get("probe_score")
    if probes:
        levels[POLICY] = probes[-1][1]
    return sorted(((name, level) for name, level in levels.items() if math.isfinite(level)), key=lambda one: -one[1])


def _finite(points: Points) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]
