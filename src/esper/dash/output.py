"""What is printed: lines, plain tables, scores on a scale, texts that cannot steer a terminal, and JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
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
"""Columns that names, scores and notes take beside the scale."""
_LONGEST_SCALE = 56
_SHORTEST_SCALE = 12

SECONDS_BETWEEN_LINES = 30.0
"""The longest time without a line where there is no terminal."""


def console_beside(machine_readable: bool) -> Console:
    """Where people read: stderr if stdout is for a machine."""
    return Console(stderr=machine_readable)


def print_line(console: Console, line: str) -> None:
    """A line as it is: neither wrapped nor coloured, and no markup in it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class RegularLines:
    """Prints what is under way whenever no line came for 30 seconds; nothing on a terminal. It is a context manager."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def postpone(self) -> None:
        """Count the 30 seconds from now, as somebody else has just printed a line."""
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def _print_regularly(self) -> None:
        while not self._ended.wait(max(self._due - time.monotonic(), 0.0)):
            if time.monotonic() >= self._due:
                print_line(self._console, self._describe_progress())
                self.postpone()


def print_differences(console: Console, whose: str, differences: Sequence[SettingDifference]) -> None:
    """A line for each key, or one that says that there is none."""
    print_line(console, f"{whose}: {'different from the defaults in' if differences else 'the defaults'}")
    for one in differences:
        print_line(console, f"  {one}")


def print_json(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """A line of JSON on stdout."""
    sys.stdout.write(f"{json.dumps(record)}\n")


def plain_table(*columns: str) -> Table:
    """An empty table without lines, with these columns."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="underline")
    for column in table.columns:
        column.overflow = "fold"
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as blocks of eight heights."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in shown)


def score_table(scores: Sequence[tuple[str, float]], width: int, notes: Mapping[str, str] | None = None) -> Table:
    """Controllers and their scores, the best first, on one scale; the policy stands out, `notes` stand beside names."""
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
