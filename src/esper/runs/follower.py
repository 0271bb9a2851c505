"""Follows a run store that another process writes to, also when it is rewound or another file takes its place.

`esper dash` follows runs by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeVar

from esper.errors import RunError
from esper.runs.events import RunResumed
from esper.runs.reader import EventRecord, RunReader

BACKLOG = 5000
"""Events that a follower may be behind; with more it is told to load everything anew."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """What came since the last look."""

    last_id: int
    """Of the newest event that there is."""
    records: list[EventRecord] = field(default_factory=list[EventRecord])
    """The new events, in order."""
    reload: bool = False
    """Whether what was known before may be wrong, and the records are not all."""


class StoreFollower:
    """Looks at a run store again and again, and opens it anew when it was replaced.

    Looks may run in another thread, also while the follower is closed: that waits for the one under way.
    """

    def __init__(self, store: Path, after: int = 0) -> None:
        """Events with ids above `after` are new."""
        self._store = store
        self._last_id = after
        self._newest: EventRecord | None = None
        self._reader: RunReader | None = None
        self._file: tuple[int, int] | None = None
        self._lock = Lock()

    def close(self) -> None:
        """Release the store; the next look opens it again."""
        with self._lock:
            self._release()

    def read(self, query: Callable[[RunReader], T]) -> T:
        """What a query finds in the store as it is now; RunError while that cannot be read.

        Any two calls get the same reader as long as the store is the same file.
        """
        with self._lock:
            try:
                return query(self._open())
            except RunError:
                self._release()
                raise

    def poll(self, types: Collection[str]) -> StoreUpdate:
        """What came since the last call, of these types and of resumptions; RunError as `read`."""

        def update(reader: RunReader) -> StoreUpdate:
            with reader.snapshot():
                return self._update(reader, types)

        return self.read(update)

    def _release(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _open(self) -> RunReader:
        try:
            status = self._store.stat()
            file = status.st_dev, status.st_ino
        except OSError:
            file = None
        if self._reader is None or file != self._file:
            self._release()
            self._reader = RunReader.open(self._store)
            if self._file not in (None, file):
                self._newest, self._last_id = None, -1  # nothing of the other file is known here
            self._file = file
        return self._reader

    def _update(self, reader: RunReader, types: Collection[str]) -> StoreUpdate:
        last_id, before, newest = reader.last_id(), self._last_id, self._newest
        if last_id == before and newest is not None and reader.holds(newest):
            return StoreUpdate(last_id)
        self._last_id = last_id
        self._newest = next(iter(reader.records(last_id - 1, 1)), None)
        # An id that is given again after a rewind belongs to an event of another time.
        rewound = last_id < before or (newest is not None and not reader.holds(newest))
        if before < 0 or rewound or last_id - before > BACKLOG:
            return StoreUpdate(last_id, reload=True)
        records = reader.records_between(before, last_id, sorted({*types, RunResumed.name}))
        return StoreUpdate(last_id, records, any(record.type == RunResumed.name for record in records))
