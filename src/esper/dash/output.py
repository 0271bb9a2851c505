"""Printing: lines, plain tables, sparklines, scores on a scale, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.config.loading import SettingDifference
from esper.dash.formats import score
from esper.dash.reporter import postpone_lines
from esper.errors import escape_unprintable

BLOCKS = "▁▂▃▄▅▆▇█"
POLICY = "policy (greedy)"
POLICY_STYLE = "bold cyan"
LABEL_STYLE = "dim"
_BESIDE_SCALE = 52
"""Columns of the terminal that names, scores and notes take beside the scale."""
_LONGEST_SCALE = 56
_SHORTEST_SCALE = 12


def console_beside(machine_readable: bool) -> Console:
    """The console for text: stderr if stdout has machine-readable output."""
    return Console(stderr=machine_readable)


def print_line(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, without colours or markup."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
    postpone_lines()


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
