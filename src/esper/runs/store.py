"""Writing a run's metadata, events and scalars."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from esper.errors import RunError
from esper.runs.database import create_database, open_for_writing, translate_errors
from esper.runs.events import Event, encode, event_types
from esper.runs.reader import QueryResult, RunReader

COMMIT_SECONDS = 0.075
"""Between commits while records keep coming."""
CAPACITY = 20_000
"""Events that may wait; whoever emits one more commits them all first."""


class EventRow(NamedTuple):
    """An event as the store keeps it."""

    time: float
    """Seconds since 1970."""
    type: str
    version: int
    iteration: int
    payload: str


def encode_events(events: Iterable[Event]) -> list[EventRow]:
    """Events that happen now; made where they happen, which may be another process."""
    now = time.time()
    return [EventRow(now, event.name, event.version, event.iteration, encode(event)) for event in events]


class RunStore(RunReader):
    """The one writer of a run store.

    Events and scalars wait in memory until a thread commits them, some thirteen times a second, or `flush` does: what
    was flushed is safe, and a crash loses what came in the last moment before it. No event is ever left out. A scalar
    that waits when its name gets a newer value in the same iteration is replaced, and counted as `coalesced`. Reading
    through this object sees what was committed.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path, connection)
        self.coalesced = 0
        """Scalars that were replaced before they were committed."""
        self.thread_seconds = 0.0
        """CPU time of the thread that commits."""
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
        """Make a new store; RunError if `path` exists or cannot be written."""
        return cls(path, create_database(path))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing store for appending; RunError if it is missing, damaged or not ours."""
        return cls(path, open_for_writing(path))

    def close(self) -> None:
        """Flush, then release the file."""
        self._closing.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an error under way is not hidden behind one of the last flush."""
        with nullcontext() if error is None else suppress(RunError):
            self.close()

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        """Set JSON values by key, at once."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO metadata VALUES (?, ?)", rows)

    def emit(self, event: Event) -> None:
        """Append an event; RunError if too much waits already and the store cannot be written."""
        self.append(encode_events([event]))

    def append(self, rows: Iterable[EventRow]) -> None:
        """Append events that were made elsewhere; raises as `emit` does."""
        with self._waiting:
            full = len(self._events) >= CAPACITY
        if full:
            self.flush()
        with self._waiting:
            self._events.extend(rows)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record an iteration's figures, all in one commit; a later value of the same name replaces an earlier one."""
        with self._waiting:
            for name, value in values.items():
                self.coalesced += (iteration, name) in self._scalars
                self._scalars[iteration, name] = float(value)

    def flush(self) -> None:
        """Commit what waits, all or nothing.

        Raises:
            RunError: the store cannot be written, for instance on a full disk; what waits is kept for the next try.
        """
        with self._using:
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
                with self._waiting:
                    self._events[:0] = events
                    self._scalars = {**scalars, **self._scalars}
                raise

    def rewind(self, iteration: int) -> None:
        """Forget everything after `iteration`, except history such as interruptions, before doing it again."""
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
            with suppress(RunError):  # whoever flushes next is told, if it is still so
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
