"""The tab of what happened last."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from esper.dash.run_view import RunView
from esper.dash.terminal import printable
from esper.dash.watch.lines import Lines
from esper.dash.watch.text import EVENT_HEAD, event_line
from esper.runs.events import PolicyLooked, StepTaken
from esper.runs.reader import EventRecord

NOTABLE, ALL = "all but decisions", "all"
_DECISIONS = (StepTaken.name, PolicyLooked.name)
_STYLES = {"anomaly_raised": "yellow", "rolled_back": "red", "run_failed": "red", "run_interrupted": "yellow"}


class EventsPane(Vertical):
    """Recent events, the newest first; the arrow keys choose which types."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "filter(-1)", "Previous type"),
        Binding("right", "filter(1)", "Next type"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.filter = NOTABLE
        self._view: RunView | None = None
        self._records: list[EventRecord] = []

    def compose(self) -> ComposeResult:
        """The filter and the lines."""
        yield Static(id="events-head")
        yield Lines(id="events-lines")

    def show(self, view: RunView | None) -> None:
        """Draw a run; None before it is known."""
        self._view = view
        self._records = view.events(self._types()) if view else []
        head = Text.assemble(("showing: ", "bold"), printable(self.filter), "\n", (EVENT_HEAD, "bold"))
        head.no_wrap = True
        self.query_one("#events-head", Static).update(head)
        self.query_one(Lines).show(len(self._records), self._line)

    def action_filter(self, by: int) -> None:
        """Show other types."""
        choices = [NOTABLE, ALL, *(self._view.recent if self._view else ())]
        place = choices.index(self.filter) if self.filter in choices else 0
        self.filter = choices[(place + by) % len(choices)]
        self.show(self._view)

    def _types(self) -> list[str]:
        known = list(self._view.recent) if self._view else []
        if self.filter == ALL:
            return known
        return [name for name in known if name not in _DECISIONS] if self.filter == NOTABLE else [self.filter]

    def _line(self, index: int, width: int) -> Text:
        record = self._records[index]
        line = event_line(record, self._view)[:width] if self._view else ""
        return Text(line, _STYLES.get(record.type, ""), no_wrap=True)
