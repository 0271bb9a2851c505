"""What has become of a run, in a few figures that cost little to read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from esper.experiments.lock import held
from esper.experiments.run_directory import RunDirectory
from esper.telemetry.events import RunEnded, RunFailed, RunInterrupted, RunResumed, RunStarted
from esper.telemetry.reader import EventRecord, RunReader

SCORES = {"train": "objective", "grow": "validation_accuracy"}
"""The scalar that tells how well a run of a command does."""


class State(StrEnum):
    """Where a run is in its life."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """It stopped or was killed before its end, and can be resumed."""
    FAILED = "failed"
    DAMAGED = "damaged"
    """Its store cannot be read."""


LIFE = (RunStarted, RunResumed, RunInterrupted, RunFailed, RunEnded)
"""Events that begin or end a process of a run."""
_ENDS = {RunEnded.name: State.FINISHED, RunFailed.name: State.FAILED}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, and how well it does."""

    command: str
    state: State
    done: int
    """Iterations, or epochs of `esper grow`."""
    total: int | None
    score: float | None
    """Of the newest one: J of a training run, accuracy of a growing model, both on validation data."""
    probe_score: float | None
    """Mean test score of the greedy policy when it was last measured."""
    started: float | None
    """Seconds since 1970."""


def progress_of(run: RunDirectory, reader: RunReader) -> Progress:
    """As the run's store and its lock say."""
    metadata = reader.metadata()
    command, done = str(metadata.get("command", "?")), reader.last_iteration()
    started = reader.newest(RunStarted.name)
    return Progress(
        command,
        state_of(run, reader),
        done,
        _whole(metadata.get("iterations")),
        _last(reader, SCORES.get(command, "objective"), done - 1),
        _last(reader, "probe_score", -1),
        started[0].time if started else None,
    )


def state_of(run: RunDirectory, reader: RunReader) -> State:
    """A run that has ended stays so while others, such as `esper evaluate`, use it."""
    newest = _newest_of_life(reader)
    end = _ENDS.get(newest.type) if newest else None
    if end is State.FINISHED:
        return end
    return State.RUNNING if held(run.lock) else end or State.INTERRUPTED


def _newest_of_life(reader: RunReader) -> EventRecord | None:
    found = [record for kind in LIFE for record in reader.newest(kind.name)]
    return max(found, key=lambda record: record.id, default=None)


def _last(reader: RunReader, name: str, after: int) -> float | None:
    series = reader.series(name, after)
    return series[-1][1] if series else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
