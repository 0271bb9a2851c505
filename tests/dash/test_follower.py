"""A follower tells of what came since its last look, and of everything that makes what was known doubtful."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from dash.planted_run import Plan, plant
from esper.dash import stream
from esper.dash.stream import StoreFollower
from esper.errors import RunError
from esper.runs.events import CheckpointWritten, RunResumed
from esper.runs.reader import RunReader
from esper.runs.store import RunStore
from runs.slow import slow_reader

SMALL = Plan(networks=1, slots=1, steps=2, iterations=2, ended=False)
STEPS = ["step_taken"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return plant(tmp_path / "run", SMALL)


def emit(store: Path, *iterations: int) -> None:
    with RunStore.open(store) as writer:
        for iteration in iterations:
            writer.emit(CheckpointWritten(iteration=iteration, file="file", sha256="hash"))


def newest(store: Path) -> int:
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute("SELECT max(id) FROM events").fetchone()[0]


def test_only_what_came_since_is_new_and_only_of_the_types_asked_for(store: Path):
    follower, types = StoreFollower(store, newest(store)), ["checkpoint_written"]
    assert follower.poll(types).records == []
    emit(store, 3, 4)
    update = follower.poll(types)
    assert [record.iteration for record in update.records] == [3, 4]
    assert not update.reload
    assert update.last_id == update.records[-1].id == newest(store)
    assert follower.poll(types).records == []
    assert StoreFollower(store).poll(["run_failed"]).records == []


def test_closing_waits_for_the_poll_under_way(store: Path, monkeypatch: pytest.MonkeyPatch):
    follower, (asked, answer) = StoreFollower(store), slow_reader(monkeypatch)
    with ThreadPoolExecutor() as threads:
        polled = threads.submit(follower.poll, STEPS)
        asked.wait()
        closed = threads.submit(follower.close)
        early = wait([closed], timeout=0.05).done
        answer.set()
        assert not early
        assert polled.result().records
        closed.result()


def test_a_follower_takes_up_after_any_event(store: Path):
    ids = [record.id for record in StoreFollower(store).poll(STEPS).records]
    assert len(ids) == SMALL.steps * SMALL.iterations
    assert [record.id for record in StoreFollower(store, ids[0]).poll(STEPS).records] == ids[1:]


def test_a_rewind_makes_everything_known_doubtful(store: Path):
    follower = StoreFollower(store, newest(store))
    with RunStore.open(store) as writer:
        writer.rewind(1)
    update = follower.poll(STEPS)
    assert update.reload
    assert update.last_id == newest(store)


def test_a_rewind_that_was_made_good_at_once_is_told_by_the_resumption(store: Path):
    before = newest(store)
    follower = StoreFollower(store, before)
    with RunStore.open(store) as writer:
        writer.rewind(1)
        while writer.last_id() <= before:
            writer.emit(RunResumed(iteration=1, platform={"esper": "0.1.0"}))
            writer.flush()
    assert follower.poll(["checkpoint_written"]).reload


def test_ids_that_are_given_again_are_noticed(store: Path):
    follower, before = StoreFollower(store), newest(store)
    follower.poll(STEPS)
    with RunStore.open(store) as writer:
        writer.rewind(1)
        while writer.last_id() < before:
            writer.emit(CheckpointWritten(iteration=2, file="file", sha256="hash"))
            writer.flush()
    assert newest(store) == before
    assert follower.poll(STEPS).reload
    assert not follower.poll(STEPS).reload


def test_who_is_far_behind_loads_anew(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BACKLOG", 3)
    follower = StoreFollower(store)
    assert follower.poll(STEPS).reload
    assert not follower.poll(STEPS).reload


def test_another_store_in_the_same_place_is_noticed(store: Path):
    follower = StoreFollower(store)
    first = follower._open()
    assert follower._open() is first
    follower.poll(STEPS)
    store.rename(store.with_name("old.db"))
    with pytest.raises(RunError):
        follower.poll(STEPS)
    RunStore.create(store).close()
    assert follower.poll(STEPS).reload
    assert follower._open() is not first


def test_a_rewind_in_the_midst_of_a_poll_loses_nothing(store: Path, monkeypatch: pytest.MonkeyPatch):
    follower, types, real = StoreFollower(store, newest(store)), ["checkpoint_written"], RunReader.last_id
    follower.poll(types)
    emit(store, 3, 4)

    def rewind_afterwards(reader: RunReader) -> int:
        found = real(reader)
        with RunStore.open(store) as writer:
            writer.rewind(2)
        return found

    monkeypatch.setattr(RunReader, "last_id", rewind_afterwards)
    assert [record.iteration for record in follower.poll(types).records] == [3, 4]
    monkeypatch.undo()
    emit(store, 3, 4, 5)
    assert follower.poll(types).reload


def test_another_store_is_noticed_before_the_first_poll(store: Path, tmp_path: Path):
    follower = StoreFollower(store, newest(store))
    follower._open()
    other = plant(tmp_path / "other", Plan(networks=1, slots=1, steps=2, iterations=4, ended=False))
    assert newest(other) > newest(store)
    other.replace(store)
    assert follower.poll(STEPS).reload
