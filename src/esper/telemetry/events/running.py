"""The life of a run: its start, its stops and its checkpoints."""

from dataclasses import dataclass

from esper.telemetry.events.record import Event, register


@register("run_started")
@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """A new run begins."""

    history = True

    esper_version: str
    seed: int


@register("run_interrupted")
@dataclass(frozen=True, slots=True)
class RunInterrupted(Event):
    """The run stopped before its end, for instance by Ctrl-C."""

    history = True

    reason: str


@register("run_failed")
@dataclass(frozen=True, slots=True)
class RunFailed(Event):
    """The run stopped at an error; `reason` is its message."""

    history = True

    reason: str


@register("run_resumed")
@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """The run goes on after the checkpoint of `iteration`."""

    history = True

    esper_version: str


@register("run_ended")
@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """All iterations are done; `seconds` counts the last process only."""

    history = True

    seconds: float


@register("checkpoint_written")
@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint is safe on disk; `file` is relative to the run directory."""

    file: str
    sha256: str
