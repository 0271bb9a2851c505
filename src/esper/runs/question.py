"""A question that somebody asks of a run store in SQL."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.errors import RunError
from esper.runs.limits import ASKING_SECONDS, chunks, limit_reading
from esper.runs.views import VIEWS, definitions

TABLES = ("events", "scalars", "metadata")
"""What the views are made of."""

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a question came to: names of columns, and rows of numbers, texts and None."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def ask(connection: sqlite3.Connection, path: Path, sql: str) -> QueryResult:
    """Answer one SELECT about the store at `path`.

    Raises:
        RunError: it is not SQL, names something unknown, would change anything or read another file, or takes longer
            or is larger than `esper.runs.limits` say.
    """
    refused: list[int] = []

    def judge(action: int, *_: str | None) -> int:
        if action in _READING:
            return sqlite3.SQLITE_OK
        refused.append(action)
        return sqlite3.SQLITE_DENY

    try:
        with limit_reading(connection, path, ASKING_SECONDS):
            # SQLite makes these two at their first use, which an authorizer sees as a write.
            connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
            connection.set_authorizer(judge)
            cursor = connection.execute(sql)
            rows = [row for chunk in chunks(cursor, path) for row in chunk]
    except sqlite3.Error as error:
        raise RunError(_refusal(error, bool(refused), path)) from error
    finally:
        connection.set_authorizer(None)
    if cursor.description is None:
        raise RunError(f"the query is empty: {_advice()}")
    return QueryResult(tuple(name for name, *_ in cursor.description), rows)


def view_columns() -> dict[str, tuple[str, ...]]:
    """Names of the columns of every view, by view; they are the same in every run."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE events (id, time, type, version, iteration, payload)")
        connection.executescript(definitions("VIEW"))
        return {
            name: tuple(column for column, *_ in connection.execute(f"SELECT * FROM {name} LIMIT 0").description)
            for name in VIEWS
        }


def _refusal(error: sqlite3.Error, refused: bool, path: Path) -> str:
    if refused:
        return "only SELECT is allowed, a run is not to be changed: " + _advice()
    return f"the run store {path} cannot answer the query ({error}): {_advice()}"


def _advice() -> str:
    return f"ask of the views {', '.join(VIEWS)}, or of the tables {', '.join(TABLES)}"
