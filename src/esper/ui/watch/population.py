"""All networks of the newest episode, a line each."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from esper.ui.watch.known import Known
from esper.ui.watch.lines import Lines
from esper.ui.watch.networks import Network
from esper.ui.watch.stages import lane, legend
from esper.ui.watch.words import decision, figure

_DECISION = 24
_FIGURE = 8
_FIGURES = f"{'net':>4} {{:>{_FIGURE}}} {'J':>6}  {'last decision':<{_DECISION}} "
_SHORTEST_LANE = 6


class Population(Vertical):
    """What every network's growth is about and J on validation data, its last decision, and a lane per slot."""

    def __init__(self) -> None:
        super().__init__()
        self._known = Known()
        self._networks: list[Network] = []

    def compose(self) -> ComposeResult:
        """A head, the lines, and what the glyphs mean."""
        yield Static(id="population-head")
        yield Lines(id="population-lines")
        yield Static(legend(), id="legend")

    def show(self, known: Known) -> None:
        """Draw what is known now."""
        self._known, self._networks = known, known.networks
        self.query_one("#population-head", Static).update(self._head())
        self.query_one(Lines).show(len(self._networks), self._line)

    def network(self, index: int) -> int:
        """The number of the network on a line."""
        return self._networks[index].number

    def _head(self) -> Text:
        if not self._networks:
            return Text("no decisions yet, or the run keeps none (telemetry.steps_every is 0)", "italic")
        width = self._lane_width(self.size.width)
        names = " ".join(self._known.slot(index)[:width].ljust(width) for index in range(self._slots()))
        return Text(_FIGURES.format(self._known.metric[:_FIGURE]) + names, "bold", no_wrap=True)

    def _line(self, index: int, width: int) -> Text:
        network = self._networks[index]
        last = network.steps[-1] if network.steps else None
        ended = network.ended
        measured = ended.accuracy if ended else last.metric if last else None
        objective = ended.objective if ended else last.objective if last else None
        done = decision(last, self._known.slot) if last else ""
        figures = f"{network.number:>4} {figure(measured):>{_FIGURE}} {figure(objective):>6}"
        text = Text(f"{figures}  {done[:_DECISION]:<{_DECISION}} ", no_wrap=True)
        for slot in range(self._slots()):
            stages = [step.stages[slot] for step in network.steps if slot < len(step.stages)]
            text.append_text(lane(stages, self._known.steps, self._lane_width(width)))
            text.append(" ")
        return text

    def _slots(self) -> int:
        return max((len(one.steps[-1].stages) for one in self._networks if one.steps), default=0)

    def _lane_width(self, width: int) -> int:
        free = (width - len(_FIGURES.format(""))) // max(self._slots(), 1) - 1
        return max(min(free, self._known.steps), _SHORTEST_LANE)
