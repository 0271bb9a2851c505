"""The tab of all networks of the newest episode, a line each."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from esper.dash.run_view import RunView
from esper.dash.terminal import printable
from esper.dash.watch.lines import Lines
from esper.dash.watch.text import decision_text, measure, stage_lane, stage_legend, stages_of
from esper.runs.metric import Metric

_DECISION = 24
_FIGURE = 8
_FIGURES = f"{'net':>4} {{:>{_FIGURE}}} {'J':>6}  {'last decision':<{_DECISION}} "
_SHORTEST_LANE = 6


class PopulationPane(Vertical):
    """What every network's growth is about and J on validation data, its last decision, and a lane per slot."""

    def __init__(self) -> None:
        super().__init__()
        self._view: RunView | None = None

    def compose(self) -> ComposeResult:
        """A head, the lines, and what the glyphs mean."""
        yield Static(id="population-head")
        yield Lines(id="population-lines")
        yield Static(stage_legend(), id="legend")

    def show(self, view: RunView | None) -> None:
        """Draw a run; None before it is known."""
        self._view = view
        self.query_one("#population-head", Static).update(self._head(view))
        self.query_one(Lines).show(len(view.networks) if view else 0, self._line)

    def number_at(self, index: int) -> int | None:
        """The number of the network on a line."""
        return self._view.networks[index].number if self._view else None

    def _head(self, view: RunView | None) -> Text:
        if view is None or not view.networks:
            return Text("no decisions yet, or the run keeps none (telemetry.steps_every is 0)", "italic")
        width = self._lane_width(view, self.size.width)
        names = " ".join(printable(view.slot(index))[:width].ljust(width) for index in range(_slots(view)))
        return Text(_FIGURES.format(printable(Metric.of(view.metadata).metric)[:_FIGURE]) + names, "bold", no_wrap=True)

    def _line(self, index: int, width: int) -> Text:
        view = self._view
        if view is None:
            return Text()
        network = view.networks[index]
        last = network.decisions[-1] if network.decisions else {}
        ended = network.ended
        measured = ended["accuracy"] if ended else last.get("metric")
        objective = (ended or last).get("objective")
        done = decision_text(last, view) if last else ""
        figures = f"{network.number:>4} {measure(measured):>{_FIGURE}} {measure(objective):>6}"
        text = Text(f"{figures}  {done[:_DECISION]:<{_DECISION}} ", no_wrap=True)
        for slot in range(_slots(view)):
            text.append_text(stage_lane(stages_of(network, slot), view.steps, self._lane_width(view, width)))
            text.append(" ")
        return text

    def _lane_width(self, view: RunView, width: int) -> int:
        free = (width - len(_FIGURES.format(""))) // max(_slots(view), 1) - 1
        return max(min(free, view.steps), _SHORTEST_LANE)


def _slots(view: RunView) -> int:
    return max((len(one.decisions[-1]["stages"]) for one in view.networks if one.decisions), default=0)
