"""Writing a run's metadata, events and scalars."""

import json
import sqlite3
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from esper.telemetry.database import create_database, open_for_writing, translated_errors
from esper.telemetry.events import Event, encode, event_types
from esper.telemetry.reader import RunReader


class RunStore(RunReader):
    """The one writer of a run store.

    Events and scalars wait in memory until `flush` commits them together; so a crash loses what came after the last
    flush and nothing else. Reading through this object sees what was flushed.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path, connection)
        self._events: list[tuple[float, str, int, int, str]] = []
        self._scalars: list[tuple[int, str, float]] = []

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make a new store; RunError if `path` exists or cannot be written."""
        return cls(path, create_database(path))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing store for appending; RunError if it is missing, damaged or not ours."""
        return cls(path, open_for_writing(path))

    def close(self) -> None:
        """Flush, then release the file."""
        try:
            self.flush()
        finally:
            super().close()

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        """Set JSON values by key, at once."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO metadata VALUES (?, ?)", rows)

    def emit(self, event: Event) -> None:
        """Append an event at the next flush."""
        self._events.append((time.time(), event.name, event.version, event.iteration, encode(event)))

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record an iteration's figures at the next flush; a later value of the same name replaces an earlier one."""
        self._scalars.extend((iteration, name, float(value)) for name, value in values.items())

    def flush(self) -> None:
        """Commit what waits, all or nothing.

        Raises:
            RunError: the store cannot be written, for instance on a full disk; what waits is kept for the next try.
        """
        if not self._events and not self._scalars:
            return
        with self._transaction():
            self._connection.executemany(
                "INSERT INTO events (time, type, version, iteration, payload) VALUES (?, ?, ?, ?, ?)", self._events
            )
            self._connection.executemany("INSERT OR REPLACE INTO scalars VALUES (?, ?, ?)", self._scalars)
        self._events.clear()
        self._scalars.clear()

    def rewind(self, iteration: int) -> None:
        """Forget everything after `iteration`, except history such as interruptions, before doing it again."""
        self._events.clear()
        self._scalars.clear()
        history = [name for name, event_type in event_types().items() if event_type.history]
        marks = ", ".join("?" for _ in history)
        with self._transaction():
            self._connection.execute("DELETE FROM scalars WHERE iteration > ?", (iteration,))
            self._connection.execute(
                f"DELETE FROM events WHERE iteration > ? AND type NOT IN ({marks})", (iteration, *history)
            )

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with translated_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back on any error
                yield
