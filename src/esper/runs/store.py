"""Writing a run's metadata, events and scalars."""

import json
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from esper.errors import RunError
from esper.runs.database import create_database, open_for_writing, translate_errors
from esper.runs.events import Event, encode_event, event_types
from esper.runs.reader import QueryResult, RunReader

COMMIT_SECONDS = 0.075
"""Seconds between commits while there are new records."""
CAPACITY = 20_000
"""Largest number of events that may wait; before one more is added, all are committed."""


class EventRow(NamedTuple):
    """An event as the store keeps it."""

    time: float
    """Seconds since 1970."""
    type: str
    version: int
    iteration: int
    payload: str


def encode_events(events: Iterable[Event]) -> list[EventRow]:
    """Encode events with the current time, in the process where they happen."""
    now = time.time()
    return [EventRow(now, event.name, event.version, event.iteration, encode_event(event)) for event in events]


class RunStore(RunReader):
    """The only writer of a run store.

    Events and scalars wait in memory until a thread commits them, about thirteen times a second, or `flush` does. Reads
    return committed records only.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path, connection)
        self.thread_seconds = 0.0
        """Of the thread that commits, on the CPU."""
        self._events: list[EventRow] = []
        self._scalars: dict[tuple[int, str], float] = {}
        self._waiting = threading.Lock()
        """Held while `_events` and `_scalars` change."""
        self._using = threading.RLock()
        """Held while the connection is in use."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._commit_regularly, name=f"commits to {path}", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a new store."""
        return cls(path, create_database(path))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing store for appending."""
        return cls(path, open_for_writing(path))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            super().close()

    def __exit__(self, *error: object) -> None:
        """Close the store; an error in the last flush does not hide an earlier error."""
        with suppress(RunError) if any(error) else nullcontext():
            self.close()

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO metadata VALUES (?, ?)", rows)

    def emit(self, event: Event) -> None:
        """Append an event; RunError if too many wait and the store cannot be written."""
        self.append(encode_events([event]))

    def append(self, rows: Iterable[EventRow]) -> None:
        """Append encoded events, for instance from another process."""
        # Outside the lock, because `flush` takes it, too.
        with self._waiting:
            is_full = len(self._events) >= CAPACITY
        if is_full:
            self.flush()
        with self._waiting:
            self._events.extend(rows)

    def record_scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record an iteration's scalars, all in one commit; a later value replaces an earlier one."""
        with self._waiting:
            self._scalars |= {(iteration, name): float(value) for name, value in values.items()}

    def flush(self) -> None:
        """Commit all waiting records, or none of them."""
        with self._using:
            # Take the waiting records, so that other threads can add more during the commit.
            with self._waiting:
                events, scalars = self._events, self._scalars
                self._events, self._scalars = [], {}
            if not events and not scalars:
                return
            try:
                with self._transaction():
                    self._connection.executemany(
                        "INSERT INTO events (time, type, version, iteration, payload) VALUES (?, ?, ?, ?, ?)", events
                    )
                    self._connection.executemany(
                        "INSERT OR REPLACE INTO scalars VALUES (?, ?, ?)",
                        [(*key, value) for key, value in scalars.items()],
                    )
            except BaseException:
                # Put them back at the front of the queue; newer values of the same scalars win.
                with self._waiting:
                    self._events[:0] = events
                    self._scalars = {**scalars, **self._scalars}
                raise

    def rewind(self, iteration: int) -> None:
        """Delete everything after `iteration`, except history such as interruptions, so that it can be repeated."""
        # Waiting records are deleted, too: they belong to the iterations that are repeated.
        history = [name for name, event_type in event_types().items() if event_type.history]
        marks = ", ".join("?" for _ in history)
        with self._using, self._waiting:
            self._events, self._scalars = [], {}
            with self._transaction():
                self._connection.execute("DELETE FROM scalars WHERE iteration > ?", (iteration,))
                self._connection.execute(
                    f"DELETE FROM events WHERE iteration > ? AND type NOT IN ({marks})", (iteration, *history)
                )

    def _commit_regularly(self) -> None:
        while not self._closing.wait(COMMIT_SECONDS):
            with suppress(RunError):  # if the error persists, the next call of `flush` raises it
                self.flush()
            self.thread_seconds = time.thread_time()

    def query(self, sql: str, *parameters: int | str) -> QueryResult:
        with self._using:
            return super().query(sql, *parameters)

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._using, translate_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or rolls back on any error
                yield
