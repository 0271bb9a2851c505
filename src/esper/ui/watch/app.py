"""The application: a line on how the run is, four tabs, and a poll of the store twice a second."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Footer, Static, TabbedContent, TabPane

from esper.telemetry.run_directory import RunDirectory, RunProgress
from esper.ui.listing import printable
from esper.ui.watch.events import Events
from esper.ui.watch.feed import Feed
from esper.ui.watch.known import Known
from esper.ui.watch.learning import Learning
from esper.ui.watch.lines import Lines
from esper.ui.watch.network import NetworkPane
from esper.ui.watch.population import Population
from esper.ui.watch.words import figure

REFRESH_SECONDS = 0.5
"""Between polls; nothing is drawn more often, but for keys."""
TABS = {"population": Population, "network": NetworkPane, "learning": Learning, "events": Events}
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

    def __init__(self, run: RunDirectory, feed: Feed) -> None:
        super().__init__()
        self.animation_level = "none"
        self.known = Known()
        self._run_directory = run
        self._feed = feed

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
        if isinstance(population, Population):
            self.query_one(NetworkPane).number = population.network(message.index)
            self.action_tab("network")

    async def _follow(self) -> None:
        while True:
            if self.known.take(await asyncio.to_thread(self._feed.poll)):
                self._draw()
            await asyncio.sleep(REFRESH_SECONDS)

    def _pane(self) -> Population | NetworkPane | Learning | Events:
        found: Widget = self.query_one(f"#{self.query_one(TabbedContent).active} > *")
        assert isinstance(found, Population | NetworkPane | Learning | Events)
        return found

    def _draw(self) -> None:
        if not self.is_running:  # it is closing, and its parts are gone
            return
        known = self.known
        self.query_one("#status", Static).update(_status(self._run_directory, known.progress))
        trouble = self.query_one("#trouble", Static)
        trouble.display = known.trouble is not None
        trouble.update(Text(printable(known.trouble or "")))
        self._pane().show(known)


def _status(run: RunDirectory, progress: RunProgress | None) -> Text:
    name = printable(run.path.resolve().name)
    if progress is None:
        return Text(name, "bold")
    unit = "decision" if progress.command == "grow" else "iteration"
    total = "" if progress.total is None else f"/{progress.total}"
    parts = [f"{unit} {progress.done}{total}"]
    if progress.value is not None:
        parts.append(f"{printable(progress.metric.metric)} {figure(progress.value)}")
    if progress.probe_score is not None:
        parts.append(f"probe {figure(progress.probe_score)}")
    return Text.assemble((name, "bold"), f"  {progress.state}  ", ", ".join(parts), no_wrap=True)
