"""A run directory is made once and recognised later."""

import dataclasses
import errno
import fcntl
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import RunError
from esper.runs.events import Event, PPOUpdated, RunStarted, decode_event, encode_event, event_types, register_event
from esper.runs.run_directory import RunDirectory, is_locked
from esper.train.workers import LocalWorkers
from train.runs import launch, train_words
from train.worker_tasks import holds


def test_a_new_directory_is_made_with_its_parents_where_nothing_is(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "runs" / "first")
    assert run.checkpoints.is_dir()
    assert run.config == tmp_path / "runs" / "first" / "config.yaml"
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not empty: choose a new directory$"):
        RunDirectory.create(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "thesis.tex"}
    with pytest.raises(RunError, match="cannot make the run directory"):
        RunDirectory.create(tmp_path / "thesis.tex" / "run")


@pytest.mark.parametrize("left", ["run.lock", ".config.yaml.partial"])
def test_what_a_killed_start_left_is_taken(tmp_path: Path, left: str):
    RunDirectory.create(tmp_path)
    (tmp_path / left).touch()
    assert RunDirectory.create(tmp_path).checkpoints.is_dir()


@pytest.mark.parametrize("there", ["config.yaml", "run.db", "checkpoints/iteration-00000000.safetensors"])
def test_a_run_that_has_begun_is_not_begun_again(tmp_path: Path, there: str):
    RunDirectory.create(tmp_path)
    (tmp_path / there).touch()
    with pytest.raises(RunError, match="is not empty"):
        RunDirectory.create(tmp_path)


def test_a_run_that_was_killed_before_it_had_a_store_is_opened(tmp_path: Path):
    run = RunDirectory.create(tmp_path)
    run.config.touch()
    with pytest.raises(RunError, match="has no run.db"):
        RunDirectory.open(tmp_path)
    run.lock.touch()
    with RunDirectory.open(tmp_path).open_store() as store:
        assert store.metadata() == {}
    run.store.unlink()
    (run.checkpoints / "iteration-00000000.json").touch()
    with pytest.raises(RunError, match="has no run.db"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("missing", ["config.yaml", "run.db"])
def test_opening_needs_a_run(tmp_path: Path, missing: str):
    for name in {"config.yaml", "run.db"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(RunError, match=f"is not a run, it has no {missing}"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunError, match=f"no run at {tmp_path / 'nowhere'}"):
        RunDirectory.open(tmp_path / "nowhere")


# One process writes to a run, and whoever else tries is told which.


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.mark.landing
def test_a_second_user_is_told_of_the_first(run: RunDirectory):
    sentence = rf"run {run.path} is in use by `esper train` \(process {os.getpid()}\): wait until it ends, or stop it"
    with run.locked("esper train"), pytest.raises(RunError, match=sentence), run.locked("esper evaluate"):
        pass
    with pytest.raises(ZeroDivisionError), run.locked("esper train"):
        raise ZeroDivisionError
    with run.locked("esper evaluate"):
        assert run.lock.read_text() == f"`esper evaluate` (process {os.getpid()})"


@pytest.mark.landing
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOLCK, "cannot lock .*: move the run to a file system that has locks"),
        (errno.ENOSPC, "cannot write in .*: free some space"),
    ],
)
def test_a_file_system_that_does_not_play_along(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
):
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=sentence), run.locked("esper train"):
        pass


@pytest.mark.landing
@pytest.mark.slow
def test_workers_do_not_hold_the_lock(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with run.locked("esper train"), LocalWorkers(2) as workers:
        assert workers.map(holds, [str(run.lock)]) == [False]
    with run.locked("esper train"):
        pass


@pytest.mark.landing
def test_the_lock_vanishes_with_a_killed_process(tmp_path: Path):
    path = tmp_path / "run"
    with launch(train_words(path, "iterations=12")) as process:
        assert process.stdout is not None
        assert any("iteration 1" in line for line in process.stdout)  # it is under way
        in_use = rf"in use by `esper train` \(process {process.pid}\)"
        with pytest.raises(RunError, match=in_use), RunDirectory.open(path).locked("esper evaluate"):
            pass
        process.send_signal(signal.SIGKILL)
    with RunDirectory.open(path).locked("esper evaluate"):
        pass


@pytest.mark.landing
def test_whoever_only_looks_at_the_lock_hinders_nobody(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    run.lock.touch()
    descriptor = os.open(run.lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    # It lets go while the other one waits to try again.
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(descriptor))
    with run.locked("esper train"):
        monkeypatch.undo()
        assert is_locked(run.lock)
    assert not is_locked(run.lock)
    assert not is_locked(run.path / "no such file")


@pytest.mark.landing
def test_lookers_do_not_take_each_other_for_a_holder(run: RunDirectory):
    run.lock.touch()
    run.lock.chmod(0o444)
    descriptor = os.open(run.lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as one who looks now
    assert not is_locked(run.lock)
    os.close(descriptor)
    run.lock.chmod(0o644)
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(is_locked, [run.lock] * 1000))
        with run.locked("esper train"):
            assert all(threads.map(is_locked, [run.lock] * 1000))


# Events survive the trip to JSON and back, and strangers are refused.


TYPES = sorted(event_types().values(), key=lambda event_type: event_type.name)
JSON_VALUES = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


def values_for(kind: Any) -> st.SearchStrategy[Any]:
    if kind == dict[str, Any]:
        return JSON_VALUES
    return st.from_type(kind)


def instances(event_type: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(event_type)
    names = [field.name for field in dataclasses.fields(event_type)]
    return st.builds(event_type, **{name: values_for(hints[name]) for name in names})


@pytest.mark.landing
@pytest.mark.parametrize("event_type", TYPES, ids=lambda event_type: event_type.name)
def test_every_event_survives_the_round_trip(event_type: type[Event]):
    @given(instances(event_type))
    def check(event: Event):
        # Compared as text, because NaN differs from itself.
        assert repr(decode_event(event.name, event.version, encode_event(event))) == repr(event)

    check()


def test_non_finite_numbers_survive():
    event = PPOUpdated(
        iteration=3, optimizer_steps=1, stopped_early=True, kl=math.inf, anomalies=("kl",), metrics={"kl": -math.inf}
    )
    assert decode_event(event.name, event.version, encode_event(event)) == event


@pytest.mark.parametrize(
    "payload", ["", "{}", "[]", '{"iteration": 0, "platform": {"esper": "1"}, "seed": 1, "shoe_size": 43}']
)
def test_a_damaged_payload_is_refused(payload: str):
    with pytest.raises(RunError, match="a stored event 'run_started' is damaged"):
        decode_event("run_started", 2, payload)


@pytest.mark.parametrize(("name", "version"), [("moon_landed", 1), ("run_started", 99)])
def test_an_unknown_event_or_version_is_refused(name: str, version: int):
    with pytest.raises(RunError, match=f"'{name}' version {version} is unknown"):
        decode_event(name, version, encode_event(RunStarted(iteration=0, platform={"esper": "1.0"}, seed=7)))


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered already"):

        @register_event("run_started")
        @dataclasses.dataclass(frozen=True, slots=True)
        class Impostor(Event):
            pass
