"""New events of a run as server-sent events, which a browser can resume where its connection was lost.

Meanwhile another process may write, rewind or replace the store.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from esper.dash.pages import describe_event
from esper.errors import EsperError, RunError
from esper.runs.events import RunResumed
from esper.runs.reader import EventRecord, RunReader

POLL_SECONDS = 0.1
MISSING_SECONDS = 1.0
"""Seconds between attempts to read a run that cannot be read."""
HEARTBEAT_SECONDS = 10.0
"""Seconds of silence before a comment is sent, which keeps proxies open and shows lost connections."""
RETRY_MILLISECONDS = 1000
BACKLOG = 5000
"""Events that a browser may be behind; with more it must reload everything."""


class StoreUpdate(NamedTuple):
    """The events since the last poll."""

    last_id: int
    """Id of the newest event."""
    records: list[EventRecord]
    """The new events, in order."""
    reload: bool
    """Whether the browser must reload, as earlier events may have changed or some are missing here."""


class StoreFollower:
    """Polls a run store for events with ids above `after`, and reopens it when it was replaced.

    Polls may run in another thread; `close` waits for one that is running.
    """

    def __init__(self, store: Path, after: int = 0) -> None:
        self._store = store
        self._last_id = after
        self._newest: EventRecord | None = None
        self._reader: RunReader | None = None
        self._file: tuple[int, int] | None = None
        self._lock = Lock()

    def close(self) -> None:
        """Release the store; the next poll opens it again."""
        with self._lock:
            self._release()

    def poll(self, types: Collection[str]) -> StoreUpdate:
        """New events of these types, and resumptions, since the last call; RunError while the store cannot be read."""
        with self._lock:
            try:
                reader = self._open()
                with reader.snapshot():
                    return self._read_update(reader, types)
            except RunError:
                self._release()
                raise

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
                self._newest, self._last_id = None, -1  # ids of the former file mean nothing in this one
            self._file = file
        return self._reader

    def _read_update(self, reader: RunReader, types: Collection[str]) -> StoreUpdate:
        # Most polls find nothing new, and read two rows.
        last_id, before, newest = reader.last_id(), self._last_id, self._newest
        is_known = newest is not None and reader.holds(newest)
        if last_id == before and is_known:
            return StoreUpdate(last_id, [], reload=False)
        self._last_id = last_id
        self._newest = next(iter(reader.records(last_id - 1, 1)), None)
        # After a rewind SQLite gives ids again: then the newest event seen is gone, or has another time.
        rewound = last_id < before or (newest is not None and not is_known)
        if before < 0 or rewound or last_id - before > BACKLOG:
            return StoreUpdate(last_id, [], reload=True)
        records = reader.records_between(before, last_id, sorted({*types, RunResumed.name}))
        return StoreUpdate(last_id, records, any(record.type == RunResumed.name for record in records))


async def stream_news(
    follower: StoreFollower, types: Collection[str], stopping: Callable[[], bool]
) -> AsyncIterator[str]:
    """Messages of ``text/event-stream``: ``news`` of these types, ``reload``, and ``trouble`` once per error."""
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    failure, sent = "", time.monotonic()
    try:
        while not stopping():
            message = ""
            try:
                news = await run_in_threadpool(follower.poll, types)
            except EsperError as error:
                if str(error) != failure:
                    failure = str(error)
                    yield _message("trouble", {"error": failure})
                # In short steps, so that the server can stop meanwhile.
                for _ in range(round(MISSING_SECONDS / POLL_SECONDS)):
                    if not stopping():
                        await asyncio.sleep(POLL_SECONDS)
                continue
            # After an error the browser cannot know what it missed.
            if news.reload or failure:
                failure, message = "", _message("reload", {"cursor": news.last_id}, news.last_id)
            elif news.records:
                message = _message("news", [describe_event(record) for record in news.records], news.last_id)
            elif time.monotonic() - sent > HEARTBEAT_SECONDS:
                message = ": still here\n\n"
            if message:
                sent = time.monotonic()
                yield message
            await asyncio.sleep(POLL_SECONDS)
    finally:
        follower.close()


def _message(kind: str, data: Any, cursor: int | None = None) -> str:
    place = "" if cursor is None else f"id: {cursor}\n"
    return f"{place}event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n"
