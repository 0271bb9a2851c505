"""A feed brings everything once, then only what is new."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.store import RunStore
from esper.ui.watch import feed as watch_feed
from esper.ui.watch import queries
from esper.ui.watch.feed import Feed
from esper.ui.watch.known import Known
from ui.slow import slow_reader
from ui.watch.planted_run import METADATA, begin, changed, new_run, plant, step


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "run")


def test_only_what_is_new_is_read(run: RunDirectory):
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        store.scalars(1, {"objective": 0.5})
        store.flush()
        first = feed.poll()
        assert first.anew
        assert len(first.records) == store.last_id()
        assert first.points["objective"] == [(1, 0.5)]
        store.emit(step(1, 0, 3))
        store.scalars(2, {"objective": 0.6})
        store.flush()
        second = feed.poll()
        assert not second.anew
        assert [record.id for record in second.records] == [store.last_id()]
        assert second.points["objective"] == [(2, 0.6)]
        third = feed.poll()
        assert (third.records, third.points["objective"]) == ([], [])


def test_closing_waits_for_the_poll_under_way(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    with RunStore.create(run.store) as store, ThreadPoolExecutor() as threads:
        plant(store)
        store.flush()
        feed, (asked, answer) = Feed(run), slow_reader(monkeypatch)
        polled = threads.submit(feed.poll)
        asked.wait()
        closed = threads.submit(feed.close)
        early = wait([closed], timeout=0.05).done
        answer.set()
        assert not early
        assert polled.result().trouble is None
        closed.result()


def test_of_a_long_run_only_the_newest_is_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "RECENT", 3)
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        for episode in range(1, 20):
            plant(store, episode=episode)
        records = feed.poll().records
        # All three networks' decisions of the last episode, and a few events besides.
        assert len([record for record in records if record.type == "step_taken"]) == 9
        assert len(records) < 25
        assert [record.id for record in records] == sorted({record.id for record in records})


def test_who_is_far_behind_looks_anew(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch_feed, "_TOO_FAR_BEHIND", 20)
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        feed.poll()
        plant(store, episode=2)
        plant(store, episode=3)
        assert feed.poll().anew
        assert not feed.poll().anew


def test_ids_that_are_given_again_are_noticed(run: RunDirectory):
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        plant(store, episode=2)
        last = store.last_id()
        feed.poll()
        store.rewind(1)
        plant(store, episode=2)
        assert store.last_id() == last
        assert feed.poll().anew


def test_an_episode_whose_decisions_are_not_kept_does_not_hide_the_last_one(run: RunDirectory):
    known = Known()
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        store.emit(begin(2, 0))
        store.emit(changed(2, 0, 0, "dormant", "germinated"))
        store.flush()
        known.take(feed.poll())
        assert known.episode == 1
        assert [len(network.steps) for network in known.networks] == [3, 3, 3]
        store.emit(step(2, 0, 0))
        store.flush()
        known.take(feed.poll())
        assert known.episode == 2
        assert [network.started is not None for network in known.networks] == [True]
        assert len(known.networks[0].lives) == 1


def test_an_unknown_version_is_told_and_nothing_is_lost(run: RunDirectory):
    known = Known()
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        known.take(feed.poll())
        store._connection.execute("UPDATE events SET version = 99 WHERE type = 'step_taken'")
        store.emit(step(1, 0, 3))
        store.flush()
        store._connection.execute("UPDATE events SET version = 99 WHERE type = 'step_taken'")
        known.take(feed.poll())
        assert known.trouble is not None
        assert "version 99 is unknown here" in known.trouble
        assert len(known.networks) == 3


def test_nothing_new_changes_nothing(run: RunDirectory):
    known = Known()
    with RunStore.create(run.store) as store, closing(Feed(run)) as feed:
        plant(store)
        assert known.take(feed.poll())
        assert not known.take(feed.poll())
        store.set_metadata({**METADATA, "baseline_levels": {"none": 0.3}})
        assert known.take(feed.poll())
