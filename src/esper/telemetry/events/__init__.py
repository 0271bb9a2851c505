"""What happens in a run, as typed, versioned records."""

from esper.telemetry.events.growing import (
    EpisodeEnded,
    EpisodeStarted,
    GateJudged,
    LifecycleTransition,
    NetworkEvent,
    PolicyLooked,
    RolledBack,
    StepTaken,
)
from esper.telemetry.events.learning import AnomalyRaised, PolicyProbed, PPOUpdated
from esper.telemetry.events.record import Event, decode, encode, event_types, fields, register
from esper.telemetry.events.running import (
    CheckpointWritten,
    RunEnded,
    RunFailed,
    RunInterrupted,
    RunResumed,
    RunStarted,
)

__all__ = [
    "AnomalyRaised",
    "CheckpointWritten",
    "EpisodeEnded",
    "EpisodeStarted",
    "Event",
    "GateJudged",
    "LifecycleTransition",
    "NetworkEvent",
    "PPOUpdated",
    "PolicyLooked",
    "PolicyProbed",
    "RolledBack",
    "RunEnded",
    "RunFailed",
    "RunInterrupted",
    "RunResumed",
    "RunStarted",
    "StepTaken",
    "decode",
    "encode",
    "event_types",
    "fields",
    "register",
]
