"""One network of the newest episode in detail."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from esper.telemetry.events import StepTaken
from esper.ui.listing import listing, printable
from esper.ui.watch.known import Known
from esper.ui.watch.networks import Life, Network
from esper.ui.watch.stages import GLYPHS, lane
from esper.ui.watch.words import decision, difference, figure

DECISIONS = 30
"""Decisions that are listed."""
_USUAL = ("fossilize", "prune")
"""Causes that go without saying."""
_BESIDE_LANE = 49
"""Columns of the table of slots that are not its lanes."""


class NetworkPane(VerticalScroll, can_focus=True):
    """Its slots, its seeds' lives and its last decisions; the arrow keys go to its neighbours."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "go(-1)", "Previous"),
        Binding("right", "go(1)", "Next"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        """Of the network that is shown; None: the first."""
        self._known = Known()

    def compose(self) -> ComposeResult:
        """One drawing."""
        yield Static(id="network-body")

    def show(self, known: Known) -> None:
        """Draw what is known now."""
        self._known = known
        self.query_one("#network-body", Static).update(self._body())

    def action_go(self, by: int) -> None:
        """Show the network that is so many further."""
        numbers = [network.number for network in self._known.networks]
        if numbers:
            place = numbers.index(self.number) if self.number in numbers else 0
            self.number = numbers[(place + by) % len(numbers)]
            self.show(self._known)

    def _body(self) -> RenderableType:
        networks = self._known.networks
        if not networks:
            return Text("no network has made a decision yet", "italic")
        network = next((one for one in networks if one.number == self.number), networks[0])
        self.number = network.number
        return Group(
            self._title(network, len(networks)),
            Text(),
            self._slots(network),
            Text(),
            Text("seeds' lives, by step", "bold"),
            self._lives(network),
            Text(),
            Text("last decisions, the newest first", "bold"),
            self._decisions(network),
        )

    def _title(self, network: Network, count: int) -> Text:
        lines = [f"network {network.number} of {count}, episode {self._known.episode}"]
        if network.started:
            start = network.started
            lines[0] += f": {start.instance}, rent {start.rent:g}, {start.host_parameters} parameters"
        if network.ended:
            end = network.ended
            kept = ", ".join(name for name in end.kept if name) or "nothing"
            lines.append(
                f"ended: accuracy {figure(end.accuracy)}, J {figure(end.objective)}, added {end.added:.0%}, kept {kept}"
            )
        lines += [
            f"step {one.step}: rolled back, {one.trouble}{'; that was the end' if one.ended else ''}"
            for one in network.rollbacks
        ]
        return Text("\n".join(map(printable, lines)), "bold")

    def _slots(self, network: Network) -> RenderableType:
        table = listing("slot", "stage", "blueprint", "alpha", "contrib.", "steps")
        if not network.steps:
            return table
        last = network.steps[-1]
        width = max(self.size.width - _BESIDE_LANE, 8)
        for index, stage in enumerate(last.stages):
            stages = [step.stages[index] for step in network.steps if index < len(step.stages)]
            table.add_row(
                Text(self._known.slot(index)),
                _stage(stage),
                Text(printable(last.blueprints[index] or "")),
                f"{last.alphas[index]:.2f}" if last.blueprints[index] else "",
                difference(last.contributions[index]),
                lane(stages, self._known.steps, width),
            )
        return table

    def _lives(self, network: Network) -> RenderableType:
        if not network.lives:
            return Text("none yet", "italic")
        table = listing("slot", "blueprint", "outcome", "contrib.", "born", "blends", "holds", "ends")
        for life in network.lives:
            table.add_row(*self._life(life))
        return table

    def _life(self, life: Life) -> list[RenderableType]:
        steps = [life.began, *(life.reached.get(stage) for stage in ("blending", "holding", life.outcome))]
        return [
            Text(self._known.slot(life.slot)),
            Text(printable(life.blueprint or "")),
            _stage(life.outcome) + ("" if life.cause in ("", *_USUAL) else f" by {printable(life.cause)}"),
            difference(life.contribution),
            *("" if step is None else str(step) for step in steps),
        ]

    def _decisions(self, network: Network) -> RenderableType:
        table = listing("step", "decision", escape(self._known.metric), "J", "reward", "value")
        for step in reversed(network.steps[-DECISIONS:]):
            table.add_row(*self._decision(step))
        return table

    def _decision(self, step: StepTaken) -> list[RenderableType]:
        done = Text(decision(step, self._known.slot), "dim" if step.op == "wait" else "")
        return [
            str(step.step),
            done,
            figure(step.metric),
            figure(step.objective),
            difference(step.reward),
            difference(step.value),
        ]


def _stage(name: str) -> Text:
    return Text(printable(name), GLYPHS[name][1] if name in GLYPHS else "")
