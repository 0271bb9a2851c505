"""Follows a run's store: every poll brings what is new."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from esper.errors import RunError
from esper.telemetry.events import NetworkEvent, RunResumed
from esper.telemetry.reader import CHUNK, EventRecord, RunReader
from esper.telemetry.run_directory import RunDirectory, RunProgress, read_progress
from esper.ui.watch.queries import grows_alone, network_events, new_points, standing

_TOO_FAR_BEHIND = 4 * CHUNK
"""Events after which it costs less to look at the run anew."""


@dataclass(frozen=True, slots=True)
class News:
    """What a poll brought."""

    anew: bool = False
    """Everything known before is void."""
    trouble: str | None = None
    """Why there is no news."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    progress: RunProgress | None = None
    records: list[EventRecord] = field(default_factory=list[EventRecord])
    """In order."""
    events: list[NetworkEvent] = field(default_factory=list[NetworkEvent])
    """Those among them that tell how networks stand."""
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    """(iteration, value) by scalar."""


class Feed:
    """Polls one run; it outlives that the store is not there yet, is damaged, or is replaced.

    Polls may run in another thread, also while the feed is closed.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._reader: RunReader | None = None
        self._file: tuple[int, int] | None = None
        self._last: EventRecord | None = None
        self._known: dict[str, int] = {}
        """The last iteration of each scalar."""
        self._lock = Lock()

    def poll(self) -> News:
        """What is new; never raises for what is wrong with the run."""
        with self._lock:
            try:
                return self._poll()
            except RunError as error:
                self._release()
                return News(trouble=str(error))

    def close(self) -> None:
        """Release the store, after the poll that is under way if there is one; the next poll opens it again."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _poll(self) -> News:
        file = _identity(self._run.store)
        if file is None:
            self._release()
            return News(trouble=f"{self._run.path} has no run store now: waiting for it")
        if self._reader is None or file != self._file:
            self._release()
            self._reader, self._file = RunReader.open(self._run.store), file
            return self._all(self._reader)
        last, reader = self._last, self._reader
        if last is not None and not reader.holds(last):
            return self._all(reader)
        after = last.id if last else 0
        records = reader.records(after) if reader.last_id() - after < _TOO_FAR_BEHIND else None
        # A resumed run has deleted some of what came before.
        if records is None or any(record.type == RunResumed.name for record in records):
            return self._all(reader)
        return self._news(reader, records, anew=False)

    def _all(self, reader: RunReader) -> News:
        self._known = {}
        last = reader.last_id()
        return self._news(reader, standing(reader, grows_alone(reader.metadata()), last), anew=True)

    def _news(self, reader: RunReader, records: list[EventRecord], anew: bool) -> News:
        progress = read_progress(self._run, reader)
        metadata = reader.metadata()
        points = new_points(reader, metadata, self._known)
        news = News(anew, None, metadata, progress, records, network_events(reader, records), points)
        self._known.update({name: series[-1][0] for name, series in points.items() if series})
        self._last = records[-1] if records else None if anew else self._last
        return news


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a file; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
