"""What a browser is sent while it follows a run."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dash.planted_run import Plan, plant
from esper.dash import stream
from esper.dash.stream import StoreFollower, stream_news

SMALL = Plan(networks=1, slots=1, steps=2, iterations=2, ended=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return plant(tmp_path / "run", SMALL)


def newest(store: Path) -> int:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute("SELECT max(id) FROM events").fetchone()[0]


def test_trouble_is_told_once_and_its_end_too(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MISSING_SECONDS", 0.01)
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.01)
    hidden = store.with_name("hidden.db")
    kinds: list[str] = []

    async def watch() -> None:
        follower = StoreFollower(store, newest(store))
        store.rename(hidden)
        async for message in stream_news(follower, ["step_taken"], lambda: kinds.count("event: reload") > 0):
            kinds.extend(line for line in message.splitlines() if line.startswith("event:"))
            if kinds == ["event: trouble"]:
                await asyncio.sleep(0.1)
                hidden.rename(store)

    asyncio.run(asyncio.wait_for(watch(), 20))
    assert kinds == ["event: trouble", "event: reload"]
