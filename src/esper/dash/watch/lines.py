"""A list that draws only the lines in view, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

Draw = Callable[[int, int], Text]
"""The line of an index, for a width."""


class Lines(ScrollView, can_focus=True):
    """Lines with a cursor, which the arrow keys move and Enter acts on."""

    # A line is cut where the list ends; a bar below would cover the last one while the width is being found out.
    DEFAULT_CSS = "Lines { overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "first", "First", show=False),
        Binding("end", "last", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    cursor: reactive[int] = reactive(0)

    class Chosen(Message):
        """Enter was pressed on a line."""

        def __init__(self, index: int) -> None:
            self.index = index
            super().__init__()

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._count = 0
        self._draw: Draw = lambda index, width: Text()  # noqa: ARG005

    def show(self, count: int, draw: Draw) -> None:
        """Show so many lines."""
        self._count, self._draw = count, draw
        self.virtual_size = Size(self.scrollable_content_region.width, count)
        self.cursor = self._within(self.cursor)
        self.call_after_refresh(self._reveal)  # how far it can scroll is known then
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """The line at row ``y`` of the screen's part."""
        width, index = self.size.width, self.scroll_offset.y + y
        if index >= self._count:
            return Strip.blank(width, self.rich_style)
        text = self._draw(index, width)
        text.end = ""
        if index == self.cursor and self.has_focus:
            text.stylize("reverse")
        strip = Strip(text.render(self.app.console))
        return strip.adjust_cell_length(width).apply_style(self.rich_style)

    def action_move(self, by: int) -> None:
        """Move the cursor by lines."""
        self.cursor = self._within(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by screens."""
        self.action_move(by * max(self.size.height - 1, 1))

    def action_first(self) -> None:
        """Move the cursor to the top."""
        self.cursor = 0

    def action_last(self) -> None:
        """Move the cursor to the bottom."""
        self.cursor = self._within(self._count)

    def action_choose(self) -> None:
        """Act on the line at the cursor."""
        if self._count:
            self.post_message(self.Chosen(self.cursor))

    def on_resize(self) -> None:
        """Keep the cursor in view when there is less room."""
        self._reveal()

    def watch_cursor(self, cursor: int) -> None:
        """Keep the cursor in view."""
        self.call_after_refresh(self._reveal)
        self.refresh()

    def _reveal(self) -> None:
        top, height = self.scroll_offset.y, max(self.size.height, 1)
        if not top <= self.cursor < top + height:
            y = self.cursor if self.cursor < top else self.cursor - height + 1
            self.scroll_to(y=y, animate=False, immediate=True)
            self.refresh()

    def _within(self, index: int) -> int:
        return min(max(index, 0), max(self._count - 1, 0))
