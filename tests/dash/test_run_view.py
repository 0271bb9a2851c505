"""A run as its store tells of it at one moment."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dash.watch.planted_run import METADATA, begin, changed, new_run, plant, step
from esper.dash import run_view
from esper.dash.run_view import RunView
from esper.dash.watch.app import Watch
from esper.errors import RunError
from esper.runs.follower import StoreFollower
from esper.runs.run_directory import RunDirectory, State
from esper.runs.store import RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "run")


def test_of_a_long_run_only_the_newest_is_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_view, "RECENT", 3)
    with RunStore.create(run.store) as store:
        for episode in range(1, 20):
            plant(store, episode=episode)
        view = RunView.read(run, store)
    assert view.episode == 19
    assert [len(network.decisions) for network in view.networks] == [3, 3, 3]
    assert {name: len(records) for name, records in view.recent.items()} == {
        **dict.fromkeys(("episode_started", "lifecycle_transition", "step_taken"), 3),
        "run_started": 1,
    }
    newest = view.events(["step_taken", "run_started"])
    assert [record.id for record in newest] == sorted((record.id for record in newest), reverse=True)


def test_an_episode_whose_decisions_are_not_kept_does_not_hide_the_last_one(run: RunDirectory):
    with RunStore.create(run.store) as store:
        plant(store)
        store.emit(begin(2, 0))
        store.emit(changed(2, 0, 0, "dormant", "germinated"))
        store.flush()
        view = RunView.read(run, store)
        assert view.episode == 1
        assert [len(network.decisions) for network in view.networks] == [3, 3, 3]
        store.emit(step(2, 0, 0))
        store.flush()
        view = RunView.read(run, store)
        assert view.episode == 2
        assert [network.started is not None for network in view.networks] == [True]
        assert len(view.networks[0].seeds()) == 1


def test_only_what_is_new_is_parsed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    real, parsed = run_view.read_payload, list[str]()

    def count(text: str) -> dict[str, object]:
        parsed.append(text)
        return real(text)

    monkeypatch.setattr(run_view, "read_payload", count)
    with RunStore.create(run.store) as store:
        plant(store)
        first = RunView.read(run, store)
        assert len(parsed) == len(first.parsed) > 0
        parsed.clear()
        store.emit(step(1, 0, 3))
        store.flush()
        second = RunView.read(run, store, first)
        assert len(parsed) == 1
        assert len(second.networks[0].decisions) == 4
        store.rewind(0)
        assert RunView.read(run, store, second).parsed == {}


def test_an_unknown_version_is_told_and_nothing_is_lost(run: RunDirectory):
    with RunStore.create(run.store) as store, closing(StoreFollower(run.store)) as follower:
        plant(store)
        watch = Watch(run, follower)
        assert watch._look()
        store.emit(step(1, 0, 3))
        store.flush()
        store._connection.execute("UPDATE events SET version = 99 WHERE type = 'step_taken'")
        with pytest.raises(RunError, match="version 99 is unknown here"):
            RunView.read(run, store)
        assert watch._look()
        assert watch.trouble is not None
        assert "version 99 is unknown here" in watch.trouble
        assert watch.view is not None
        assert len(watch.view.networks) == 3


def test_nothing_new_changes_nothing(run: RunDirectory):
    with RunStore.create(run.store) as store, closing(StoreFollower(run.store)) as follower:
        plant(store)
        watch = Watch(run, follower)
        assert watch._look()
        assert not watch._look()
        store.set_metadata({**METADATA, "baseline_levels": {"none": 0.3}})
        assert watch._look()
        store.scalars(1, {"objective": 0.5})
        store.flush()
        assert watch._look()
        assert watch.view is not None
        assert watch.view.curves["objective"] == [(1, 0.5)]


def test_a_run_that_was_let_go_while_it_was_read_is_read_anew(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    real = run_view.read_progress
    with RunStore.create(run.store) as store, closing(StoreFollower(run.store)) as follower:
        plant(store)
        watch = Watch(run, follower)
        monkeypatch.setattr(run_view, "read_progress", lambda *given: replace(real(*given), state=State.RUNNING))
        assert watch._look()
        monkeypatch.undo()
        assert watch._look()
        assert watch.view is not None
        assert watch.view.progress.state is State.INTERRUPTED
