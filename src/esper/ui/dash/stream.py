"""What is new in a run, as server-sent events that a browser can take up again where it lost them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.concurrency import run_in_threadpool

from esper.errors import EsperError
from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.log import as_entry

POLL_SECONDS = 0.1
MISSING_SECONDS = 1.0
"""Between looks for a run that cannot be read."""
HEARTBEAT_SECONDS = 10.0
"""After so much silence a comment tells proxies and the server itself whether anybody is still there."""
RETRY_MILLISECONDS = 1000
BACKLOG = 5000
"""Events that a follower may be behind; with more it is told to load everything anew."""
_RESUMED = "run_resumed"


@dataclass(frozen=True)
class News:
    """What came since the last look; `cursor` is the id of the newest event that there is."""

    cursor: int
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reload: bool = False
    """Whether what was known before may be wrong, and the entries are not all."""


class Follower:
    """Looks at a run store again and again; events of these ``types`` after ``cursor`` are news.

    Polls may run in another thread, also while the follower is closed.
    """

    def __init__(self, store: Path, types: Collection[str], cursor: int) -> None:
        self._store = store
        self._types = sorted({*types, _RESUMED})
        self._cursor = cursor
        self._reader: RunReader | None = None
        self._identity: tuple[int, int] | None = None
        self._lock = Lock()

    def close(self) -> None:
        """Release the store, after the poll that is under way if there is one."""
        with self._lock:
            self._release()

    def poll(self) -> News:
        """What came since the last call; RunError while the store cannot be read."""
        with self._lock:
            reader, replaced = self._open()
            try:
                return self._news(reader, replaced)
            except EsperError:
                self._release()
                raise

    def _release(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _open(self) -> tuple[RunReader, bool]:
        """The reader, and whether it reads another file than before."""
        try:
            status = self._store.stat()
            identity = (status.st_dev, status.st_ino)
        except OSError:
            identity = None
        before = self._identity
        if self._reader is None or identity != before:
            self._release()
            self._reader = RunReader.open(self._store)
            self._identity = identity
        return self._reader, before not in (None, identity)

    def _news(self, reader: RunReader, replaced: bool) -> News:
        last, before = reader.last_id(), self._cursor
        self._cursor = last
        if replaced or last < before or last - before > BACKLOG:
            return News(last, reload=True)
        if last == before:
            return News(last)
        marks = ", ".join("?" for _ in self._types)
        rows = reader.rows(
            f"SELECT id, time, type, iteration, payload FROM events WHERE id > ? AND id <= ? AND +type IN ({marks})"
            " ORDER BY id",
            *(before, last, *self._types),
        )
        entries = [as_entry(row) for row in rows]
        return News(last, entries, any(entry["type"] == _RESUMED for entry in entries))


async def follow(follower: Follower, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Messages of ``text/event-stream`` until ``stopping``: ``news``, ``reload``, and ``trouble`` once per trouble.

    A message's id is that of the newest event it knows of.
    """
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    trouble, spoken = "", time.monotonic()
    try:
        while not stopping():
            try:
                news = await run_in_threadpool(follower.poll)
            except EsperError as error:
                if str(error) != trouble:
                    trouble, spoken = str(error), time.monotonic()
                    yield _message("trouble", {"error": trouble})
                await _pause(MISSING_SECONDS, stopping)
                continue
            if news.reload or trouble:
                trouble, spoken = "", time.monotonic()
                yield _message("reload", {"cursor": news.cursor}, news.cursor)
            elif news.entries:
                spoken = time.monotonic()
                yield _message("news", news.entries, news.cursor)
            elif time.monotonic() - spoken > HEARTBEAT_SECONDS:
                spoken = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(POLL_SECONDS)
    finally:
        follower.close()


async def _pause(seconds: float, stopping: Callable[[], bool]) -> None:
    for _ in range(round(seconds / POLL_SECONDS)):
        if not stopping():
            await asyncio.sleep(POLL_SECONDS)


def _message(kind: str, data: Any, cursor: int | None = None) -> str:
    place = "" if cursor is None else f"id: {cursor}\n"
    return f"{place}event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n"
