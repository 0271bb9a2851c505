"""Printing: lines, plain tables, sparklines, scores on a scale, and JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.config.settings import SettingDifference
from esper.dash.formats import score
from esper.errors import escape_unprintable

BLOCKS = "▁▂▃▄▅▆▇█"
POLICY = "policy (greedy)"
POLICY_STYLE = "bold cyan"
LABEL_STYLE = "dim"
_BESIDE_SCALE = 52
"""Columns of the terminal that names, scores and notes take beside the scale."""
_LONGEST_SCALE = 56
_SHORTEST_SCALE = 12

SECONDS_BETWEEN_LINES = 30.0
"""The longest time without a line where there is no terminal."""


def console_beside(machine_readable: bool) -> Console:
    """The console for text: stderr if stdout has machine-readable output."""
    return Console(stderr=machine_readable)


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, without colours or markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class RegularLines:
    """Context manager that prints the progress after 30 seconds without a line; on a terminal it prints nothing."""

    def __init__(self, console: Console, describe_progress: Callable[[], str]) -> None:
        self._console = console
        self._describe_progress = describe_progress
        self._due = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_regularly, name="progress lines", daemon=True)

    def __enter__(self) -> Self:
        self.postpone()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def postpone(self) -> None:
        """Restart the 30 seconds, after a line was printed."""
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def _print_regularly(self) -> None:
        while not self._ended.wait(max(self._due - time.monotonic(), 0.0)):
            if time.monotonic() >= self._due:
                print_line(self._console, self._describe_progress())
                self.postpone()


def print_differences(console: Console, title: str, differences: Sequence[SettingDifference]) -> None:
    """Print how settings differ from the defaults, one line per key."""
    print_line(console, f"{title}: {'different from the defaults in' if differences else 'the defaults'}")
    for difference in differences:
        print_line(console, f"  {difference}")


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print a line of JSON on stdout."""
    sys.stdout.write(f"{json.dumps(record)}\n")


def plain_table(*columns: str) -> Table:
    """An empty table with these columns, without borders."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="underline")
    for column in table.columns:
        column.overflow = "fold"
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as blocks of eight heights."""
    values = values[-width:]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in values)


def score_table(scores: Sequence[tuple[str, float]], width: int, notes: Mapping[str, str] | None = None) -> Table:
    """A table of controllers and their scores on one scale, best first. The policy is highlighted.

    ``notes`` by controller are shown at the end of its row.
    """
    # A row with the ends of the scale, then a row per controller with its place on the scale.
    high, low = scores[0][1], scores[-1][1]
    table = Table.grid(padding=(0, 2))
    scale = max(min(width - _BESIDE_SCALE, _LONGEST_SCALE), _SHORTEST_SCALE)
    ends = Text(f"{score(low)} {'·' * (scale - 12)} {score(high)}", LABEL_STYLE, no_wrap=True)
    table.add_row(Text("score on the same problems", "bold"), "", ends, "")
    for name, level in scores:
        style = POLICY_STYLE if name == POLICY else ""
        place = round((level - low) / (high - low) * (scale - 1)) if high > low else 0
        note = Text((notes or {}).get(name, ""), LABEL_STYLE)
        mark = Text("─" * place + "●", style, no_wrap=True)
        table.add_row(Text(escape_unprintable(name), style), Text(score(level), style), mark, note)
    return table
