"""The line of the cursor stays in view, whatever becomes of the terminal."""

from __future__ import annotations

import asyncio

import pytest
from rich.text import Text
from textual.app import App, ComposeResult

from esper.dash.watch.lines import Lines

COUNT = 20


class Alone(App[None]):
    def compose(self) -> ComposeResult:
        yield Lines(id="lines")


def seen_after(keys: list[str], size: tuple[int, int], then: tuple[int, int]) -> tuple[int, list[str]]:
    """The cursor and the lines in view once a terminal of one ``size`` has become another."""

    async def run() -> tuple[int, list[str]]:
        async with Alone().run_test(size=size) as pilot:
            lines = pilot.app.query_one(Lines)
            lines.focus()
            lines.show(COUNT, lambda index, _: Text(f"line {index}"))
            await pilot.press(*keys)
            await pilot.pause()
            await pilot.resize_terminal(*then)
            await pilot.pause()
            rows = range(lines.scrollable_content_region.height)
            return lines.cursor, [lines.render_line(y).text.strip() for y in rows]

    return asyncio.run(run())


@pytest.mark.parametrize("keys", [["end"], ["down"] * 8], ids=["last", "middle"])
@pytest.mark.parametrize("then", [(40, 4), (20, 10), (20, 4), (60, 12)], ids=str)
def test_the_cursor_is_seen_and_nothing_covers_a_line(keys: list[str], then: tuple[int, int]):
    cursor, lines = seen_after(keys, (40, 10), then)
    assert len(lines) == then[1]
    assert f"line {cursor}" in lines
