"""What reading a run store may cost: a file that somebody damaged, by accident or on purpose, holds nobody up."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import Any

from esper.errors import RunError

READING_SECONDS = 60.0
"""For a query: the slowest of a figure takes 2 seconds in a run of 160 MB."""
LARGEST_VALUE = 2**24
"""Bytes of a text or blob."""
LARGEST_ANSWER = 2**31
"""Bytes of all rows of an answer, as Python holds them."""
_STEPS = 1000
"""Instructions of SQLite between looks at the clock, which are also chances for Ctrl-C: some microseconds."""
_CHUNK = 1000
"""Rows between looks at their size."""


@contextmanager
def limit_reading(connection: sqlite3.Connection, path: Path) -> Generator[None]:
    """Stop what the connection to the store at ``path`` does within as soon as it has taken longer.

    Raises:
        RunError: it has.
        KeyboardInterrupt: Ctrl-C stopped it before.
    """
    seconds = READING_SECONDS
    end = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
    # To count a whole table is one instruction, which only an interruption from outside ends.
    alarm = Timer(seconds, connection.interrupt)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    except sqlite3.OperationalError as error:
        if result_code(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        if time.monotonic() < end:
            raise KeyboardInterrupt from error
        raise RunError(
            f"reading the run store {path} took more than {seconds:g} seconds, and was stopped: "
            "ask of less of it, or if all reading of it ends so, it is damaged"
        ) from error
    finally:
        alarm.cancel()
        alarm.join()
        connection.set_progress_handler(None, 0)


def chunks(cursor: sqlite3.Cursor, path: Path) -> Iterator[list[Any]]:
    """All rows, some at a time.

    Raises:
        RunError: together they are larger than what a store may answer.
    """
    size = 0
    while chunk := cursor.fetchmany(_CHUNK):
        size += sum(map(sys.getsizeof, chain.from_iterable(chunk)))
        if size > LARGEST_ANSWER:
            raise RunError(
                f"the run store {path} answered with more than {LARGEST_ANSWER >> 30} GiB, and was stopped: "
                "ask of less of it, for instance with LIMIT"
            )
        yield chunk


def result_code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None for an error of Python's own, for instance over a text that is not UTF-8."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
