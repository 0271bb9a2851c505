"""The tab of how learning goes: the curves of a run and what they are measured against."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from esper.dash.run_view import RunView
from esper.dash.terminal import POLICY, plain_table, printable, score_table, sparkline
from esper.dash.watch.text import amount, event_line
from esper.runs.events import AnomalyRaised

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


class LearningPane(VerticalScroll, can_focus=True):
    """A line per figure, the score among the baselines', and recent anomalies."""

    def compose(self) -> ComposeResult:
        """One drawing."""
        yield Static(id="learning-body")

    def show(self, view: RunView | None) -> None:
        """Draw a run; None before it is known."""
        self.query_one("#learning-body", Static).update(self._body(view))

    def _body(self, view: RunView | None) -> RenderableType:
        parts = [_curves(view, max(self.size.width - _BESIDE_CURVE, 8))]
        if view is None:
            return parts[0]
        if scores := view.scores():
            parts += [Text(), score_table(scores, self.size.width)]
        if anomalies := view.events([AnomalyRaised.name])[:ANOMALIES]:
            parts += [Text(), Text("anomalies, the newest first", "bold")]
            parts += [Text(event_line(one, view), "yellow") for one in anomalies]
        return Group(*parts)


def _curves(view: RunView | None, width: int) -> RenderableType:
    table = plain_table("figure", "now", "by iteration")
    for name, points in view.curves.items() if view else ():
        finite = [value for _, value in points if math.isfinite(value)]
        now, curve = (amount(finite[-1]), sparkline(finite, width)) if finite else ("-", "")
        label = _NAMES.get(name, printable(name.replace("_", " ")))
        table.add_row(Text(label), now, Text(curve, "cyan", no_wrap=True))
    return table
