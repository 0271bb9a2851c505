"""What happened last."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from esper.telemetry.events import PolicyLooked, StepTaken
from esper.telemetry.reader import EventRecord
from esper.ui.listing import printable
from esper.ui.watch.known import Known
from esper.ui.watch.lines import Lines
from esper.ui.watch.words import EVENT_HEAD, event_line

NOTABLE, ALL = "all but decisions", "all"
_DECISIONS = (StepTaken.name, PolicyLooked.name)
_STYLES = {"anomaly_raised": "yellow", "rolled_back": "red", "run_failed": "red", "run_interrupted": "yellow"}


class Events(Vertical):
    """Recent events, the newest first; the arrow keys choose which types."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "filter(-1)", "Previous type"),
        Binding("right", "filter(1)", "Next type"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.filter = NOTABLE
        self._known = Known()
        self._records: list[EventRecord] = []

    def compose(self) -> ComposeResult:
        """The filter and the lines."""
        yield Static(id="events-head")
        yield Lines(id="events-lines")

    def show(self, known: Known) -> None:
        """Draw what is known now."""
        self._known, self._records = known, known.events(self._types(known))
        head = Text.assemble(("showing: ", "bold"), printable(self.filter), "\n", (EVENT_HEAD, "bold"))
        head.no_wrap = True
        self.query_one("#events-head", Static).update(head)
        self.query_one(Lines).show(len(self._records), self._line)

    def action_filter(self, by: int) -> None:
        """Show other types."""
        choices = [NOTABLE, ALL, *self._known.event_types]
        place = choices.index(self.filter) if self.filter in choices else 0
        self.filter = choices[(place + by) % len(choices)]
        self.show(self._known)

    def _types(self, known: Known) -> list[str]:
        if self.filter == ALL:
            return known.event_types
        if self.filter == NOTABLE:
            return [name for name in known.event_types if name not in _DECISIONS]
        return [self.filter]

    def _line(self, index: int, width: int) -> Text:
        record = self._records[index]
        return Text(event_line(record, self._known.slot)[:width], _STYLES.get(record.type, ""), no_wrap=True)
