"""Following a run."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from esper.errors import RunError
from esper.telemetry.events import CheckpointWritten, RunResumed
from esper.telemetry.store import RunStore
from esper.ui.dash import stream
from esper.ui.dash.stream import Follower, follow
from ui.dash.planted_run import Plan, plant
from ui.slow import slow_reader

SMALL = Plan(networks=1, slots=1, steps=2, iterations=2, ended=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return plant(tmp_path / "run", SMALL)


def emit(store: Path, *iterations: int) -> None:
    with RunStore.open(store) as writer:
        for iteration in iterations:
            writer.emit(CheckpointWritten(iteration=iteration, file="file", sha256="hash"))


def newest(store: Path) -> int:
    with sqlite3.connect(store) as connection:
        return connection.execute("SELECT max(id) FROM events").fetchone()[0]


def test_only_what_came_since_is_news_and_only_of_the_types_asked_for(store: Path):
    follower = Follower(store, ["checkpoint_written"], newest(store))
    assert follower.poll().entries == []
    emit(store, 3, 4)
    news = follower.poll()
    assert [entry["iteration"] for entry in news.entries] == [3, 4]
    assert news.cursor == news.entries[-1]["id"] == newest(store)
    assert follower.poll().entries == []
    assert Follower(store, ["run_failed"], 0).poll().entries == []


def test_closing_waits_for_the_poll_under_way(store: Path, monkeypatch: pytest.MonkeyPatch):
    follower, (asked, answer) = Follower(store, ["step_taken"], 0), slow_reader(monkeypatch)
    with ThreadPoolExecutor() as threads:
        polled = threads.submit(follower.poll)
        asked.wait()
        closed = threads.submit(follower.close)
        early = wait([closed], timeout=0.05).done
        answer.set()
        assert not early
        assert polled.result().entries
        closed.result()


def test_a_follower_takes_up_after_any_event(store: Path):
    ids = [entry["id"] for entry in Follower(store, ["step_taken"], 0).poll().entries]
    assert len(ids) == SMALL.steps * SMALL.iterations
    assert [entry["id"] for entry in Follower(store, ["step_taken"], ids[0]).poll().entries] == ids[1:]


def test_a_rewind_makes_everything_known_doubtful(store: Path):
    follower = Follower(store, ["step_taken"], newest(store))
    with RunStore.open(store) as writer:
        writer.rewind(1)
    news = follower.poll()
    assert news.reload
    assert news.cursor == newest(store)


def test_a_rewind_that_was_made_good_at_once_is_told_by_the_resumption(store: Path):
    before = newest(store)
    follower = Follower(store, ["checkpoint_written"], before)
    with RunStore.open(store) as writer:
        writer.rewind(1)
        while writer.last_id() <= before:
            writer.emit(RunResumed(iteration=1, esper_version="0.1.0"))
            writer.flush()
    assert follower.poll().reload


def test_who_is_far_behind_loads_anew(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BACKLOG", 3)
    assert Follower(store, ["step_taken"], 0).poll().reload


def test_another_store_in_the_same_place_is_noticed(store: Path):
    follower = Follower(store, ["step_taken"], 0)
    follower.poll()
    store.rename(store.with_name("old.db"))
    with pytest.raises(RunError):
        follower.poll()
    RunStore.create(store).close()
    assert follower.poll().reload


def test_trouble_is_told_once_and_its_end_too(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MISSING_SECONDS", 0.01)
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.01)
    hidden = store.with_name("hidden.db")
    kinds: list[str] = []

    async def watch() -> None:
        follower = Follower(store, ["step_taken"], newest(store))
        store.rename(hidden)
        async for message in follow(follower, lambda: kinds.count("event: reload") > 0):
            kinds.extend(line for line in message.splitlines() if line.startswith("event:"))
            if kinds == ["event: trouble"]:
                await asyncio.sleep(0.1)
                hidden.rename(store)

    asyncio.run(asyncio.wait_for(watch(), 20))
    assert kinds == ["event: trouble", "event: reload"]
