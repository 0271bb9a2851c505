"""Watching a run: every tab shows what was planted, follows the run, and outlives what happens to the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dash.watch.planted_run import METADATA, changed, end, new_run, plant, screen, sees, step, until, watch
from esper.dash.formats import signed_score
from esper.dash.watch import app as watch_app
from esper.runs.events import AnomalyRaised, RolledBack, RunEnded, RunFailed, RunResumed
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore

SIZES = [(80, 24), (160, 50), (40, 12)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_app, "REFRESH_SECONDS", 0.05)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "myrun")


@pytest.fixture
def store(run: RunDirectory) -> Iterator[RunStore]:
    with RunStore.create(run.store) as store:
        yield store


def test_the_population_has_a_line_per_network(run: RunDirectory, store: RunStore):
    plant(store)
    store.scalars(1, {"objective": 0.456, "probe_score": 0.654})
    store.emit(end(1, 1, 3))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        text = await sees(pilot, "myrun  interrupted  iteration 1/5, J 0.456, probe 0.654", "first", "second")
        lines = [line.split() for line in text.splitlines()]
        assert ["0", "0.600", "0.450", "wait", "·▁▁", "···"] in lines
        assert ["1", "0.810", "0.710", "wait", "·▁▁", "···"] in lines  # as its episode ended
        assert "▁ germinated" in text

    watch(run, scenario)


def test_the_last_decision_is_told_by_names(run: RunDirectory, store: RunStore):
    plant(store)
    store.emit(step(1, 2, 3, op="prune", slot=1))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "prune second")

    watch(run, scenario)


def test_arrows_and_enter_choose_a_network(run: RunDirectory, store: RunStore):
    plant(store)

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "·▁▁")
        await pilot.press("down", "enter")
        await sees(pilot, "network 1 of 3, episode 1: problem/1, rent 0.08, 404 parameters")
        await pilot.press("right")
        await sees(pilot, "network 2 of 3")
        await pilot.press("right")
        await sees(pilot, "network 0 of 3")
        await pilot.press("left")
        await sees(pilot, "network 2 of 3")
        await pilot.press("escape")
        await sees(pilot, "last decision  ")

    watch(run, scenario)


def test_a_network_shows_its_seeds_and_decisions(run: RunDirectory, store: RunStore):
    plant(store)
    store.emit(changed(1, 0, 3, "germinated", "pruned", cause="rollback", contribution=-0.125))
    store.emit(changed(1, 0, 3, "dormant", "germinated", cause="germinate", slot=1, blueprint="gate"))
    held = {"stages": ("pruned", "holding"), "blueprints": (None, "gate"), "alphas": (0.0, 0.75)}
    store.emit(step(1, 0, 3, **held, contributions=(None, 0.0625), reward=0.25, value=0.375))
    store.emit(
        RolledBack(
            iteration=1,
            episode=1,
            environment=0,
            step=3,
            trouble="accuracy",
            loss_before=1.0,
            metric_before=0.5,
            loss_after=0.9,
            metric_after=0.6,
            pruned=(0,),
            ended=False,
        )
    )
    store.emit(end(1, 0, 3))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await pilot.press("2")
        await sees(pilot, "network 0 of 3", "step 3: rolled back, accuracy")
        text = await sees(pilot, "ended: accuracy 0.810, J 0.710, added 25%, kept norm")
        rows = [" ".join(line.split()) for line in text.splitlines()]
        assert "second holding gate 0.75 +0.0625 ···▆" in rows
        assert f"first norm pruned by rollback {signed_score(-0.125)} 1 3" in rows
        assert "second gate unfinished 3" in rows
        assert "3 wait 0.500 0.450 +0.250 +0.375" in rows
        assert "1 germinate first norm 0.500 0.450" in rows

    watch(run, scenario, (100, 40))


def test_learning_shows_curves_levels_and_anomalies(run: RunDirectory, store: RunStore):
    plant(store)
    for iteration in range(1, 9):
        store.scalars(iteration, {"objective": iteration / 10, "ppo/kl": 0.01, "ppo/entropy": float("nan")})
    store.scalars(8, {"probe_score": 0.601})
    store.emit(AnomalyRaised(iteration=8, anomaly="kl", meaning="the policy moved too far"))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await pilot.press("3")
        text = await sees(pilot, "J, exploring", "0.800", "▁▂▃▄▅▆▇█", "KL", "the policy moved too far")
        ranked = [line.split()[0] for line in text.splitlines() if "●" in line]
        assert ranked == ["heuristic", "policy", "none"]

    watch(run, scenario, (100, 40))


def test_events_are_filtered_by_type(run: RunDirectory, store: RunStore):
    plant(store)
    store.emit(AnomalyRaised(iteration=1, anomaly="kl", meaning="the policy moved too far"))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await pilot.press("4")
        text = await sees(pilot, "showing: all but decisions", "anomaly kl, meaning the policy", "run_started")
        assert "step_taken" not in text
        assert text.index("anomaly_raised") < text.index("run_started")  # the newest first
        await pilot.press("right")
        await sees(pilot, "showing: all ", "step_taken", "1:2:2")
        await pilot.press("right")
        text = await sees(pilot, "showing: anomaly_raised")
        assert "run_started" not in text
        await pilot.press("left", "left")
        await sees(pilot, "showing: all but decisions", "slot first, before dormant, after germinated")

    watch(run, scenario, (120, 30))


def test_every_tab_follows_a_run_that_goes_on(run: RunDirectory, store: RunStore):
    plant(store)

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "·▁▁")
        store.emit(step(1, 1, 3, op="fossilize", slot=0, stages=("fossilized", "dormant")))
        store.flush()
        await sees(pilot, "fossilize first", "·▁▁█")
        plant(store, environments=2, episode=2)
        store.scalars(2, {"objective": 0.321, "ppo/kl": 0.0625})
        store.flush()
        text = await sees(pilot, "iteration 2/5, J 0.321")
        assert "0.620" not in text  # network 2 of the first episode
        await pilot.press("3")
        await sees(pilot, "KL", "0.062")
        store.scalars(3, {"objective": 0.432, "ppo/kl": 0.125})
        store.flush()
        await sees(pilot, "0.125", "▁█")
        await pilot.press("4")
        store.emit(RunEnded(iteration=5, seconds=12.0))
        store.flush()
        await sees(pilot, "myrun  finished", "run_ended")

    watch(run, scenario)


def test_a_running_and_a_failed_run_are_told_apart(run: RunDirectory, store: RunStore):
    plant(store)

    async def scenario(pilot: Pilot[None]):
        with run.locked("esper train"):
            await sees(pilot, "myrun  running")
        await sees(pilot, "myrun  interrupted")
        store.emit(RunFailed(iteration=1, reason="out of memory"))
        store.flush()
        await sees(pilot, "myrun  failed")

    watch(run, scenario)


def test_what_a_resumed_run_makes_anew_replaces_what_was(run: RunDirectory, store: RunStore):
    plant(store)
    plant(store, episode=2)

    async def scenario(pilot: Pilot[None]):
        await pilot.press("2")
        await sees(pilot, "episode 2")
        store.rewind(1)
        store.emit(RunResumed(iteration=1, esper_version="0.1.0"))
        store.flush()
        await sees(pilot, "episode 1:")
        plant(store, environments=1, episode=2)
        await sees(pilot, "network 0 of 1, episode 2")

    watch(run, scenario)


def test_a_grown_model_shows_its_decisions(run: RunDirectory, store: RunStore):
    store.set_metadata({"command": "grow", "iterations": 6, "steps": 6, "slots": ["first", "second"]})
    for epoch in range(1, 4):
        store.scalars(epoch, {"validation_accuracy": 0.5 + epoch / 10, "added_parameters": 1234.0})
        store.emit(step(1, 0, epoch - 1, metric=0.7 + epoch / 100))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        text = await sees(pilot, "decision 3/6, accuracy 0.800", "0.730")
        assert "···" in text
        await pilot.press("enter")
        await sees(pilot, "network 0 of 1, episode 1")
        await pilot.press("3")
        await sees(pilot, "validation accuracy", "added parameters", "1,234")

    watch(run, scenario)


@pytest.mark.parametrize("size", SIZES)
def test_every_tab_fits_every_terminal(run: RunDirectory, store: RunStore, size: tuple[int, int]):
    plant(store, environments=40)
    store.scalars(1, {"objective": 0.5})
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "0.600")
        await pilot.press("end")
        await sees(pilot, "0.990")  # the last network
        for key, words in {"2": "network 0", "3": "J, exploring", "4": "showing"}.items():
            await pilot.press(key)
            text = await sees(pilot, words)
            assert {len(line) for line in text.splitlines()} == {size[0]}
            assert "q Quit" in text

    watch(run, scenario, size)


def test_a_terminal_that_is_resized_is_drawn_anew(run: RunDirectory, store: RunStore):
    store.set_metadata({**METADATA, "steps": 40})
    for number in range(40):
        store.emit(step(1, 0, number))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "··· ")
        assert "·" * 40 not in screen(pilot)
        await pilot.resize_terminal(160, 24)
        await sees(pilot, "·" * 40)

    watch(run, scenario)


def test_q_quits(run: RunDirectory, store: RunStore):
    plant(store)

    async def scenario(pilot: Pilot[None]):
        await pilot.press("q")
        assert not pilot.app.is_running

    watch(run, scenario)


def test_a_run_without_anything_says_so_on_every_tab(run: RunDirectory, store: RunStore):
    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "no decisions yet")
        await pilot.press("enter")
        for key, words in {"2": "no network has made a decision", "3": "by iteration", "4": "showing"}.items():
            await pilot.press(key)
            await sees(pilot, words)
        await pilot.press("left", "right")

    watch(run, scenario)


def test_a_run_that_has_just_begun_is_waited_for(run: RunDirectory):
    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "has no run store now: waiting for it")
        with RunStore.create(run.store) as store:
            plant(store)
            text = await sees(pilot, "·▁▁")
            assert "waiting" not in text

    watch(run, scenario, (200, 24))


def test_a_vanished_store_leaves_what_was_known_and_is_taken_up_again(run: RunDirectory, tmp_path: Path):
    with RunStore.create(run.store) as store:
        plant(store)

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "·▁▁")
        run.store.rename(tmp_path / "elsewhere.db")
        await sees(pilot, "waiting for it", "·▁▁")
        shutil.copy(tmp_path / "elsewhere.db", run.store)
        await until(pilot, lambda text: "waiting" not in text and "·▁▁" in text)

    watch(run, scenario, (160, 24))


def test_a_damaged_store_is_told_of(run: RunDirectory):
    with RunStore.create(run.store) as store:
        plant(store)

    async def scenario(pilot: Pilot[None]):
        await sees(pilot, "·▁▁")
        broken = run.path / "broken"
        broken.write_bytes(b"once upon a time, " * 100)
        broken.replace(run.store)
        await sees(pilot, "is damaged or not a run store", "·▁▁")

    watch(run, scenario, (200, 24))


def test_what_a_store_says_cannot_steer_the_terminal(run: RunDirectory, store: RunStore):
    plant(store)
    store.set_metadata({"slots": ["\x1b[31mred", "[b]bold[/b]"]})
    store.emit(step(1, 0, 3, op="wait\x1b]0;title\x07", slot=0, stages=("\x1b[2J", "\x9b"), blueprints=("\x1b", None)))
    store.emit(AnomalyRaised(iteration=1, anomaly="\x1b[2J\u202e", meaning="\n\n\r"))
    store.flush()

    async def scenario(pilot: Pilot[None]):
        for key in "1234":
            await pilot.press(key)
            text = await sees(pilot, {"1": "net ", "2": "[b]bold", "3": "anomalies", "4": "showing"}[key])
            assert all(line.isprintable() for line in text.splitlines())

    watch(run, scenario, (120, 40))
