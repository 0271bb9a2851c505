"""The tab of one network of the newest episode in detail."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from esper.dash.run_view import Fields, NetworkView, RunView
from esper.dash.terminal import plain_table, printable
from esper.dash.watch.text import as_float, decision_text, difference, measure, stage_lane, stage_text, stages_of
from esper.runs.metric import Metric

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
        self._view: RunView | None = None

    def compose(self) -> ComposeResult:
        """One drawing."""
        yield Static(id="network-body")

    def show(self, view: RunView | None) -> None:
        """Draw a run; None before it is known."""
        self._view = view
        self.query_one("#network-body", Static).update(self._body(view))

    def action_go(self, by: int) -> None:
        """Show the network that is so many further."""
        numbers = [network.number for network in self._view.networks] if self._view else []
        if numbers:
            place = numbers.index(self.number) if self.number in numbers else 0
            self.number = numbers[(place + by) % len(numbers)]
            self.show(self._view)

    def _body(self, view: RunView | None) -> RenderableType:
        if view is None or not view.networks:
            return Text("no network has made a decision yet", "italic")
        network = next((one for one in view.networks if one.number == self.number), view.networks[0])
        self.number = network.number
        return Group(
            _title(view, network),
            Text(),
            _slots(view, network, max(self.size.width - _BESIDE_LANE, 8)),
            Text(),
            Text("seeds' lives, by step", "bold"),
            _seeds(view, network),
            Text(),
            Text("last decisions, the newest first", "bold"),
            _decisions(view, network),
        )


def _title(view: RunView, network: NetworkView) -> Text:
    lines = [f"network {network.number} of {len(view.networks)}, episode {view.episode}"]
    if start := network.started:
        lines[0] += f": {start['instance']}, rent {as_float(start['rent']):g}, {start['host_parameters']} parameters"
    if end := network.ended:
        kept = ", ".join(filter(None, end["kept"])) or "nothing"
        figures = f"accuracy {measure(end['accuracy'])}, J {measure(end['objective'])}"
        lines.append(f"ended: {figures}, added {as_float(end['added']):.0%}, kept {kept}")
    lines += [
        f"step {one['step']}: rolled back, {one['trouble']}{'; that was the end' if one['ended'] else ''}"
        for one in network.rollbacks
    ]
    return Text("\n".join(map(printable, lines)), "bold")


def _slots(view: RunView, network: NetworkView, width: int) -> RenderableType:
    table = plain_table("slot", "stage", "blueprint", "alpha", "contrib.", "steps")
    if not network.decisions:
        return table
    last = network.decisions[-1]
    for index, stage in enumerate(last["stages"]):
        blueprint, alpha = last["blueprints"][index], last["alphas"][index]
        table.add_row(
            Text(printable(view.slot(index))),
            stage_text(stage),
            Text(printable(blueprint or "")),
            f"{as_float(alpha):.2f}" if blueprint else "",
            difference(last["contributions"][index]),
            stage_lane(stages_of(network, index), view.steps, width),
        )
    return table


def _seeds(view: RunView, network: NetworkView) -> RenderableType:
    seeds = network.seeds()
    if not seeds:
        return Text("none yet", "italic")
    table = plain_table("slot", "blueprint", "outcome", "contrib.", "born", "blends", "holds", "ends")
    for seed in seeds:
        cause = "" if seed.get("cause") in (None, *_USUAL) else f" by {printable(seed['cause'])}"
        steps = (seed.get(name) for name in ("germinated", "blended", "held", seed["outcome"]))
        table.add_row(
            Text(printable(view.slot(seed["slot"]))),
            Text(printable(seed["blueprint"] or "")),
            stage_text(seed["outcome"]) + cause,
            difference(seed.get("contribution")),
            *("" if step is None else str(step) for step in steps),
        )
    return table


def _decisions(view: RunView, network: NetworkView) -> RenderableType:
    table = plain_table("step", "decision", escape(printable(Metric.of(view.metadata).metric)), "J", "reward", "value")
    for step in reversed(network.decisions[-DECISIONS:]):
        table.add_row(*_decision(step, view))
    return table


def _decision(step: Fields, view: RunView) -> list[RenderableType]:
    return [
        str(step["step"]),
        Text(decision_text(step, view), "dim" if step["op"] == "wait" else ""),
        measure(step["metric"]),
        measure(step["objective"]),
        difference(step.get("reward")),
        difference(step.get("value")),
    ]
