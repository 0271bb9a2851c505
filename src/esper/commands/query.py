"""`esper query`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from esper.dash.output import print_json, say
from esper.dash.terminal import plain_table, printable
from esper.errors import RunError
from esper.runs.question import QueryResult, view_columns
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.views import VIEWS

SHOWN = 50
"""Rows of an answer that are printed for people."""
SHOWN_UPRIGHT = 5
"""The same where a row needs many lines."""
WIDEST = 100_000
"""Columns in which any row fits."""


def command(
    run: Annotated[Path, tyro.conf.Positional],
    sql: Annotated[str | None, tyro.conf.Positional] = None,
    json: bool = False,
) -> None:
    """Ask a run's store in SQL, read-only, also while the run goes on.

    Args:
        run: Directory of the run.
        sql: One SELECT; without it, the views are listed with their columns.
        json: Print all rows as a machine-readable last line.
    """
    console = Console()
    with RunReader.open(RunDirectory.open(run).store) as reader:
        answer = None if sql is None else reader.ask(sql)
    if answer is None:
        _list_views(console, json)
    elif json:
        print_json(_objects(answer))
    else:
        _show(console, answer)


def _list_views(console: Console, json: bool) -> None:
    columns = view_columns()
    if json:
        print_json([{"view": name, "row": view.meaning, "columns": columns[name]} for name, view in VIEWS.items()])
        return
    table = plain_table("view", "a row is", "columns")
    for name, view in VIEWS.items():
        table.add_row(name, view.meaning, ", ".join(columns[name]))
    console.print(table)
    say(console, '\nask for instance: esper query RUN "select * from episodes order by objective desc limit 10"')


def _show(console: Console, answer: QueryResult) -> None:
    table, shown = _table(answer), SHOWN
    unbounded = console.options.update(width=WIDEST)
    if len(answer.columns) > 1 and Measurement.get(console, unbounded, table).maximum > console.width:
        table, shown = _upright(answer), SHOWN_UPRIGHT
    console.print(table)
    hidden = len(answer.rows) - shown
    if hidden > 0:
        say(console, f"{hidden} more rows, {len(answer.rows)} in all: --json prints all of them")
    elif not answer.rows:
        say(console, "no rows")


def _table(answer: QueryResult) -> Table:
    table = plain_table(*map(printable, answer.columns))
    for row in answer.rows[:SHOWN]:
        table.add_row(*(Text(_cell(value), justify="right" if _is_number(value) else "left") for value in row))
    return table


def _upright(answer: QueryResult) -> Table:
    """A line per field, for rows that are wider than the terminal."""
    table = plain_table("row", "field", "value")
    for number, row in enumerate(answer.rows[:SHOWN_UPRIGHT], 1):
        for name, value in zip(answer.columns, row, strict=True):
            table.add_row(str(number), Text(printable(name)), Text(_cell(value)))
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case bytes():
            return value.hex()
        case _:
            return printable(str(value))


def _objects(answer: QueryResult) -> list[dict[str, Any]]:
    twice = sorted({name for name in answer.columns if answer.columns.count(name) > 1})
    if twice:
        raise RunError(f"several columns are called {', '.join(twice)}: name them apart with AS")
    return [dict(zip(answer.columns, map(_plain, row), strict=True)) for row in answer.rows]


def _plain(value: Any) -> Any:
    """As JSON can hold it; infinite numbers as in the store's payloads."""
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value.hex() if isinstance(value, bytes) else value
