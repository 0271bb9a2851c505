"""What has become of a run, in a few figures that cost little to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from esper.experiments.lock import held
from esper.experiments.run_directory import RunDirectory
from esper.telemetry.events import RunEnded, RunFailed, RunInterrupted, RunResumed, RunStarted
from esper.telemetry.metric import Metric
from esper.telemetry.reader import EventRecord, RunReader

OBJECTIVE = Metric("J")
"""What training runs are about: the scalar ``objective``."""


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
    metric: Metric
    """What tells how well the run does: J of a training run, what growth is about of a growing model."""
    value: float | None
    """Of the newest one, on validation data and in units of its own."""
    probe_score: float | None
    """Mean test score of the greedy policy when it was last measured."""
    started: float | None
    """Seconds since 1970."""


def progress_of(run: RunDirectory, reader: RunReader) -> Progress:
    """As the run's store and its lock say."""
    metadata = reader.metadata()
    command, done = str(metadata.get("command", "?")), reader.last_iteration()
    started = reader.newest(RunStarted.name)
    metric, scalar = judged_by(metadata)
    return Progress(
        command,
        state_of(run, reader),
        done,
        _whole(metadata.get("iterations")),
        metric,
        _last(reader, scalar, done - 1),
        _last(reader, "probe_score", -1),
        started[0].time if started else None,
    )


def judged_by(metadata: Mapping[str, Any]) -> tuple[Metric, str]:
    """What tells how well a run does, and the scalar that holds its values."""
    if metadata.get("command") != "grow":
        return OBJECTIVE, "objective"
    metric = Metric.of(metadata)
    return metric, metric.scalar


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
