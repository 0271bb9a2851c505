"""What is new in a run, as server-sent events that a browser can take up again where it lost them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from starlette.concurrency import run_in_threadpool

from esper.dash.answers import describe_event
from esper.errors import EsperError
from esper.runs.follower import StoreFollower

POLL_SECONDS = 0.1
MISSING_SECONDS = 1.0
"""Between looks for a run that cannot be read."""
HEARTBEAT_SECONDS = 10.0
"""After so much silence a comment tells proxies and the server itself whether anybody is still there."""
RETRY_MILLISECONDS = 1000


async def stream_news(
    follower: StoreFollower, types: Collection[str], stopping: Callable[[], bool]
) -> AsyncIterator[str]:
    """Messages of ``text/event-stream`` until ``stopping``: ``news``, ``reload``, and ``trouble`` once per trouble.

    News are events of these ``types``; a message's id is that of the newest event it knows of.
    """
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    trouble, spoken = "", time.monotonic()
    try:
        while not stopping():
            try:
                news = await run_in_threadpool(follower.poll, types)
            except EsperError as error:
                if str(error) != trouble:
                    trouble, spoken = str(error), time.monotonic()
                    yield _message("trouble", {"error": trouble})
                await _pause(MISSING_SECONDS, stopping)
                continue
            if news.reload or trouble:
                trouble, spoken = "", time.monotonic()
                yield _message("reload", {"cursor": news.last_id}, news.last_id)
            elif news.records:
                spoken = time.monotonic()
                yield _message("news", [describe_event(record) for record in news.records], news.last_id)
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
