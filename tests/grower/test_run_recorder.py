"""A grower's own run: what it keeps equals what `step` returned, through every way to stop and go on."""

import copy
import gc
import math
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import esper
from esper import Decision, GrowerConfig, attach
from esper.cli import main
from esper.errors import ConfigError, DivergedError, EsperError, RunError
from esper.lifecycle.actions import Op
from esper.lifecycle.table import Stage
from esper.numerics.devices import describe_platform
from esper.runs.events import (
    Event,
    GateChecked,
    LifecycleTransition,
    RolledBack,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
    StepTaken,
)
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, RunState, read_progress
from esper.runs.store import RunStore
from factories import Loop, make_host, packed, validate

BLOWN_UP = 6
"""Decision whose loss is not finite."""
TOLD = (StepTaken, LifecycleTransition, GateChecked, RolledBack)


def train(loop: Loop, decisions: int) -> list[Decision]:
    return [
        loop.epoch(lambda loss: math.nan if loop.grower.decisions == BLOWN_UP - 1 else loss) for _ in range(decisions)
    ]


def events(run: Path, *kinds: type[Event]) -> list[Event]:
    with RunReader.open(run / "run.db") as reader:
        return [event for event in map(reader.decode, reader.records(limit=100_000)) if isinstance(event, kinds)]


def kept(run: Path) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """All that a run tells of growth: events, scalars, metadata."""
    with RunReader.open(run / "run.db") as reader:
        scalars = {name: reader.series(name) for name in reader.scalar_names()}
        return [str(event) for event in events(run, *TOLD)], scalars, {**reader.metadata(), "id": None}


def state(run: Path) -> RunState:
    with RunReader.open(run / "run.db") as reader:
        return read_progress(RunDirectory(run), reader).state


@pytest.mark.parametrize("controller", ["heuristic", "random", "periodic", "all_at_start", "none"])
def test_the_store_holds_what_every_step_returned(controller: str, tmp_path: Path):
    run = tmp_path / "runs" / "mine"
    loop = Loop(controller, run=run)
    slots = list(loop.model.slots)
    for _ in range(12):
        (decision,) = train(loop, 1)
        # Durable as soon as step has returned: read by another connection.
        with RunReader.open(run / "run.db") as reader:
            step = reader.events(StepTaken)[-1]
            changes = [one for one in reader.events(LifecycleTransition) if one.iteration == decision.number]
            rollbacks = [one for one in reader.events(RolledBack) if one.iteration == decision.number]
            scalars = reader.scalars_at(decision.number)
        assert (step.iteration, step.step, step.op) == (decision.number, decision.number - 1, decision.op.name.lower())
        assert (step.slot, step.blueprint) == (
            None if decision.slot is None else slots.index(decision.slot),
            decision.blueprint,
        )
        assert step.contributions == tuple(decision.contributions.get(slot) for slot in slots)
        assert [(one.error, one.price, one.threshold) for one in changes] == [
            (None, None, None) if one.rating is None else (one.rating.error, one.rating.price, one.rating.threshold)
            for one in decision.changes
        ]
        assert [(slots[one.slot], one.before, one.after, one.blueprint, one.cause, one.reason) for one in changes] == [
            (one.slot, *(part.name.lower() for part in (one.before, one.after)), one.blueprint, one.cause.name.lower(),
             one.reason.name.lower())
            for one in decision.changes
        ]  # fmt: skip
        assert [one.trouble for one in rollbacks] == (
            [] if decision.rollback is None else [decision.rollback.trouble.name.lower()]
        )
        added = sum(parameter.numel() for seed in loop.model.seeds.values() for parameter in seed.parameters())
        assert scalars["added_parameters"] == added
        assert (scalars["validation_loss"], scalars["validation_accuracy"]) == (step.loss, step.metric)
        assert {name.removeprefix("contribution/"): value for name, value in scalars.items() if "/" in name} == (
            decision.contributions
        )
    assert len(events(run, StepTaken)) == 12
    assert len(events(run, RolledBack)) == 1


def test_the_metric_in_training_is_recorded_only_where_it_was_given(tmp_path: Path):
    run = tmp_path / "run"
    loop = Loop("none", run=run)
    train(loop, 1)
    with RunReader.open(run / "run.db") as reader:
        assert "validation_accuracy" in reader.scalar_names()
        assert "train_accuracy" not in reader.scalar_names()
    loop.grower.step(train_loss=1.0, train_accuracy=0.5)
    with RunReader.open(run / "run.db") as reader:
        assert reader.series("train_accuracy") == [(2, 0.5)]


def test_recording_changes_nothing_about_the_growth(tmp_path: Path):
    loops = [Loop("random", seed=3), Loop("random", seed=3, run=tmp_path / "run", verbose=True)]
    told = [list(map(str, train(loop, 10))) for loop in loops]
    assert told[0] == told[1]
    torch.testing.assert_close(loops[0].model.state_dict(), loops[1].model.state_dict(), rtol=0, atol=0)
    states = [loop.grower.state_dict() for loop in loops]
    assert states[0].pop("callbacks") == {}
    assert states[1].pop("callbacks").keys() == {"PrintDecisions", "RunRecorder"}
    assert torch.equal(*map(packed, states))


@pytest.mark.parametrize("controller", ["heuristic", "random"])
@pytest.mark.parametrize(("saved_after", "further"), [(2, 0), (3, 2), (5, 4), (8, 1)])
@pytest.mark.few(2)
def test_a_resumed_run_tells_what_one_that_was_never_cut_tells(
    controller: str, saved_after: int, further: int, tmp_path: Path
):
    """Also where it went on for some decisions after it was saved, which are then forgotten."""
    train(Loop(controller, run=tmp_path / "whole"), 12)
    cut = Loop(controller, run=tmp_path / "cut")
    train(cut, saved_after)
    saved = copy.deepcopy(cut.saved())
    train(cut, further)
    train(Loop.resume(saved, controller, run=tmp_path / "cut"), 12 - saved_after)
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")
    assert [event.iteration for event in events(tmp_path / "cut", RunResumed)] == [saved_after]
    platforms = [event.platform for event in events(tmp_path / "cut", RunStarted, RunResumed)]
    assert platforms == [describe_platform(["cpu"])] * 2
    with pytest.raises(RunError, match="no longer writes"):
        train(cut, 1)


def test_a_grower_that_kept_no_run_goes_on_in_a_new_folder_or_one_in_which_nothing_was_decided(tmp_path: Path):
    loop = Loop("heuristic")
    train(loop, 3)
    train(Loop.resume(loop.saved(), "heuristic", run=tmp_path / "run"), 2)
    assert [event.iteration for event in events(tmp_path / "run", StepTaken)] == [4, 5]
    loops = [Loop("heuristic", run=tmp_path / "empty") for _ in range(3)]
    train(loops[-1], 1)
    assert len(events(tmp_path / "empty", StepTaken, RunStarted)) == 2


def by_esper_train(path: Path) -> None:
    with RunDirectory.create(path).open_store() as store:
        store.set_metadata({"command": "train", "iterations": 3})


def with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").touch()


def of_other_slots(path: Path) -> None:
    model = attach(make_host(), {"0": ["mlp"]}, torch.zeros(2, 4))
    train(Loop("heuristic", model, run=path), 1)


def of_no_grower(path: Path) -> None:
    train(Loop("heuristic", run=path), 1)
    with closing(sqlite3.connect(path / "run.db")) as store, store:
        store.execute("DELETE FROM metadata WHERE key = 'id'")


def damaged(path: Path) -> None:
    path.mkdir()
    (path / "run.db").write_bytes(b"not SQLite" * 99)


@pytest.mark.parametrize("made", [by_esper_train, with_a_file, Path.touch, of_other_slots, of_no_grower, damaged])
def test_a_folder_that_holds_something_else_is_refused_at_once_and_left_as_it_is(made: Any, tmp_path: Path):
    path = tmp_path / "taken"
    made(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.suffix in (".tex", ".yaml", ".json")}
    with pytest.raises(EsperError, match=r"taken"):
        Loop("heuristic", run=path)
    assert {file: file.read_bytes() for file in before} == before


def test_a_run_of_the_same_kind_is_refused_unless_its_own_grower_goes_on(tmp_path: Path):
    train(Loop("heuristic", run=tmp_path / "mine"), 2)
    other = Loop("heuristic", run=tmp_path / "other")
    train(other, 1)
    before = kept(tmp_path / "mine")
    with pytest.raises(RunError, match="already holds a run: continue it by load_state_dict"):
        train(Loop("heuristic", run=tmp_path / "mine"), 1)
    for saved in (other.saved(), Loop("heuristic").saved()):
        with pytest.raises(RunError, match="holds a different run than the one"):
            Loop.resume(saved, "heuristic", run=tmp_path / "mine")
    assert kept(tmp_path / "mine") == before


@pytest.mark.slow
def test_a_run_that_another_process_writes_is_refused(tmp_path: Path):
    run = tmp_path / "run"
    program = (
        "import sys; from factories import Loop; loop = Loop('none', run=sys.argv[1]); "
        "print(1, flush=True); sys.stdin.read()"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), *sys.path]))}
    words = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(RunError, match="in use by `esper.Grower`"):
            Loop("none", run=run)
        assert state(run) is RunState.RUNNING
        other.communicate()
    assert state(run) is RunState.INTERRUPTED
    train(Loop("none", run=run), 1)


def test_a_mistake_in_another_argument_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError):
        Loop("heuristik", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_ends_with_its_last_planned_decision_and_goes_on_after_it(tmp_path: Path):
    loop = Loop("none", run=tmp_path / "run")  # whose horizon is 20
    train(loop, 19)
    assert state(tmp_path / "run") is RunState.RUNNING
    train(loop, 1)
    assert state(tmp_path / "run") is RunState.FINISHED
    train(loop, 1)
    assert state(tmp_path / "run") is RunState.RUNNING
    assert [event.iteration for event in events(tmp_path / "run", StepTaken)] == list(range(1, 22))


def test_a_finished_run_whose_grower_is_loaded_stays_finished_until_another_decision(tmp_path: Path):
    loop = Loop("none", run=tmp_path / "run")
    train(loop, 20)
    saved = loop.saved()
    for _ in range(2):
        again = Loop.resume(saved, "none", run=tmp_path / "run")
        assert state(tmp_path / "run") is RunState.FINISHED
        again.grower.finish()
    assert not events(tmp_path / "run", RunResumed)
    assert len(events(tmp_path / "run", RunEnded)) == 1
    train(again, 1)
    assert state(tmp_path / "run") is RunState.RUNNING
    assert [event.iteration for event in events(tmp_path / "run", RunResumed)] == [20]


def test_a_loop_that_stops_early_says_so_also_where_it_went_back_from_the_end(tmp_path: Path):
    loop = Loop("none", run=tmp_path / "run")
    train(loop, 5)
    saved = copy.deepcopy(loop.saved())
    train(loop, 15)
    again = Loop.resume(saved, "none", run=tmp_path / "run")
    train(again, 2)
    for _ in range(2):  # again does no harm
        again.grower.close()
    assert state(tmp_path / "run") is RunState.FINISHED
    assert [event.iteration for event in events(tmp_path / "run", RunEnded)] == [20, 7]
    Loop("none").grower.close()


def test_what_becomes_of_unfinished_seeds_at_the_end_is_recorded(tmp_path: Path):
    loop = Loop("all_at_start", run=tmp_path / "run", rent=0.01)
    train(loop, 4)
    ending, slots = loop.grower.finish(), list(loop.model.slots)
    assert state(tmp_path / "run") is RunState.FINISHED
    found = [one for one in events(tmp_path / "run", LifecycleTransition) if one.cause == "finish"]
    assert [(one.iteration, one.step, slots[one.slot], one.before, one.after, one.blueprint) for one in found] == [
        (4, 3, one.slot, one.before.name.lower(), one.after.name.lower(), one.blueprint) for one in ending.changes
    ]
    for event, change in zip(found, ending.changes, strict=True):
        assert change.rating is not None
        assert event.contribution == ending.contributions.get(change.slot)
        assert (event.error, event.price) == (change.rating.error, change.rating.price)
        assert (event.threshold, event.loss_gain) == (change.rating.threshold, change.rating.loss_gain)
    assert any(event.contribution is not None for event in found)
    with RunReader.open(tmp_path / "run" / "run.db") as reader:
        rows = reader.rows("SELECT outcome, contribution, error, price, threshold FROM seeds WHERE slot = 0")
    event = next(one for one in found if one.slot == 0)
    assert rows == [(event.after, event.contribution, event.error, event.price, event.threshold)]
    train(loop, 1)
    assert state(tmp_path / "run") is RunState.RUNNING


def test_the_report_s_headline_tells_what_the_end_of_growth_made_of_seeds(tmp_path: Path):
    loop = Loop("all_at_start", run=tmp_path / "run", rent=9.0)  # nothing is worth that
    train(loop, 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert re.search(r"parameters in the host and [1-9][\d,]* added by growth \(\w+ in 0", page.read_text())
    assert {change.after for change in loop.grower.finish().changes} == {Stage.PRUNED}
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "parameters in the host and 0 added by growth (none)" in page.read_text()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_grower_on_a_full_disk_raises_once_and_is_collected_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: unraisable.append(error))
    loop = Loop("none", run=tmp_path / "run")

    def refuse(_: RunStore) -> None:
        raise RunError("cannot write the run store (database or disk is full)")

    monkeypatch.setattr(RunStore, "flush", refuse)
    with pytest.raises(RunError, match="disk is full"):
        train(loop, 1)
    del loop
    gc.collect()
    assert not unraisable


def test_a_run_that_diverges_says_why(tmp_path: Path):
    loop = Loop("none", run=tmp_path / "run")
    for _ in range(3):
        loop.epoch(lambda _: math.nan)
    with pytest.raises(DivergedError) as error:
        loop.epoch(lambda _: math.nan)
    (failed,) = events(tmp_path / "run", RunFailed)
    assert failed == RunFailed(iteration=loop.grower.decisions, reason=str(error.value))


def test_verbose_prints_a_line_per_decision_and_at_the_end_what_was_tried(capsys: pytest.CaptureFixture[str]):
    loop = Loop("all_at_start", verbose=True)
    decisions = train(loop, 4)
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.startswith(f"decision {decision.number}: {decision.what}; ")
        for line, decision in zip(lines, decisions, strict=True)
    )
    assert all("loss " in line and "accuracy 0." in line for line in lines)
    assert any(decision.op is Op.GERMINATE for decision in decisions)
    ending = loop.grower.finish()
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(lines) == str(ending)
    assert len(ending.changes) == len(ending.tried) == 2
    for line, module in zip(lines[1:], ending.tried, strict=False):
        assert re.match(rf"(kept|pruned) {module.blueprint} in {module.slot} at decision 4 by finish: ", line)
    silent = Loop("all_at_start")
    train(silent, 4)
    silent.grower.finish()
    assert not capsys.readouterr().out


def test_a_run_says_all_that_its_grower_was_told(tmp_path: Path):
    options: dict[str, Any] = {"rent": 0.5, "seed": 3, "classes": 3, "train_size": 96, "controller": "none"}
    Loop(**options, evaluate=esper.Metric(validate, "f1", higher_is_better=True), run=tmp_path / "run")
    criterion: dict[str, Any] = {"metric": "f1", "higher_is_better": True, "refit": False}
    criterion |= {"objective": None, "constraints": {}}
    said = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {name: said[name] for name in (*options, *criterion)} == {**options, **criterion}
    assert said.keys() - {"host", "slots"} == GrowerConfig.model_fields.keys() - {"loss", "scaler"} | criterion.keys()


def test_every_reader_of_runs_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "runs" / "mine"
    train(Loop("heuristic", run=run), 12)
    assert isinstance(main(["runs", str(run.parent)]), int)
    assert "mine" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 2
    assert "is a run of `esper.Grower`, and not of `esper train`: it records" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
