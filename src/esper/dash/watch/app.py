"""The application: a line on how the run is, four tabs, and a poll of the store twice a second."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Footer, Static, TabbedContent, TabPane

from esper.dash.run_view import RunView
from esper.dash.terminal import printable
from esper.dash.watch.events import EventsPane
from esper.dash.watch.learning import LearningPane
from esper.dash.watch.lines import Lines
from esper.dash.watch.network import NetworkPane
from esper.dash.watch.population import PopulationPane
from esper.dash.watch.text import measure
from esper.errors import RunError
from esper.runs.follower import StoreFollower
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, RunProgress, read_progress

Pane = PopulationPane | NetworkPane | LearningPane | EventsPane
REFRESH_SECONDS = 0.5
"""Between polls; nothing is drawn more often, but for keys."""
SHARE_OF_READING = 0.2
"""Share of the time that reading a large run takes at most."""
TABS = {"population": PopulationPane, "network": NetworkPane, "learning": LearningPane, "events": EventsPane}
"""What they show, in the order of their keys, which are 1, 2, 3 and 4."""


class Watch(App[None]):
    """Shows a run as it goes on, or as it ended."""

    TITLE = "esper watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status, #trouble, #legend, #population-head, #events-head { height: auto; padding: 0 1; }
    #trouble { color: $error; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    Lines { height: 1fr; padding: 0 1; }
    #network-body, #learning-body { padding: 0 1; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(place), f"tab('{name}')", name, show=False) for place, name in enumerate(TABS, 1)),
        Binding("escape", "tab('population')", "Back", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, run: RunDirectory, follower: StoreFollower) -> None:
        super().__init__()
        self.animation_level = "none"
        self.view: RunView | None = None
        """The run when it was last read; None before that."""
        self.trouble: str | None = None
        """Why it cannot be read now."""
        self._run_directory = run
        self._follower = follower
        self._state: object = None
        """Equal as long as nothing is committed to the store."""
        self._reading_seconds = 0.0
        """CPU time of the last look."""

    def compose(self) -> ComposeResult:
        """The status, the tabs, the keys."""
        yield Static(id="status")
        yield Static(id="trouble")
        with TabbedContent(initial=next(iter(TABS))):
            for place, (name, pane) in enumerate(TABS.items(), 1):
                with TabPane(f"{place} {name.capitalize()}", id=name):
                    yield pane()
        yield Footer()

    def on_mount(self) -> None:
        """Begin to poll."""
        self.run_worker(self._follow(), exclusive=True)

    def on_resize(self) -> None:
        """Draw for the new size once the parts have theirs."""
        self.call_after_refresh(self._draw)

    def action_tab(self, name: str) -> None:
        """Go to a tab."""
        self.query_one(TabbedContent).active = name

    def on_tabbed_content_tab_activated(self) -> None:
        """Keys go to what the tab shows."""
        pane = self._pane()
        lines = pane.query(Lines)
        (lines.first() if lines else pane).focus()
        self.call_after_refresh(self._draw)

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        """A network was chosen."""
        population = self._pane()
        if isinstance(population, PopulationPane):
            self.query_one(NetworkPane).number = population.number_at(message.index)
            self.action_tab("network")

    async def _follow(self) -> None:
        while True:
            if await asyncio.to_thread(self._look):
                self._draw()
            await asyncio.sleep(max(REFRESH_SECONDS, self._reading_seconds / SHARE_OF_READING))

    def _look(self) -> bool:
        """Read the run if it has changed; what was known stays while it cannot be read. Returns whether to draw."""
        before, began = (self.view, self.trouble), time.thread_time()
        try:
            self.view, self.trouble = self._follower.read(self._read), None
        except RunError as error:
            waiting = f"{self._run_directory.path} has no run store now: waiting for it"
            self.trouble = str(error) if self._run_directory.store.is_file() else waiting
            self._state = None
        self._reading_seconds = time.thread_time() - began
        return self.view is not before[0] or self.trouble != before[1]

    def _read(self, reader: RunReader) -> RunView:
        state = reader, reader.data_version()
        # Whether a process holds the run is not in the store.
        moved = self.view and read_progress(self._run_directory, reader) != self.view.progress
        if self.view is None or moved or state != self._state:
            self.view, self._state = RunView.read(self._run_directory, reader, self.view), state
        return self.view

    def _pane(self) -> Pane:
        found: Widget = self.query_one(f"#{self.query_one(TabbedContent).active} > *")
        assert isinstance(found, Pane)
        return found

    def _draw(self) -> None:
        if not self.is_running:  # it is closing, and its parts are gone
            return
        self.query_one("#status", Static).update(_status(self._run_directory, self.view and self.view.progress))
        trouble = self.query_one("#trouble", Static)
        trouble.display = self.trouble is not None
        trouble.update(Text(printable(self.trouble or "")))
        self._pane().show(self.view)


def _status(run: RunDirectory, progress: RunProgress | None) -> Text:
    name = printable(run.path.resolve().name)
    if progress is None:
        return Text(name, "bold")
    unit = "decision" if progress.command == "grow" else "iteration"
    total = "" if progress.total is None else f"/{progress.total}"
    parts = [f"{unit} {progress.done}{total}"]
    if progress.value is not None:
        parts.append(f"{printable(progress.metric.metric)} {measure(progress.value)}")
    if progress.probe_score is not None:
        parts.append(f"probe {measure(progress.probe_score)}")
    return Text.assemble((name, "bold"), f"  {progress.state}  ", ", ".join(parts), no_wrap=True)
