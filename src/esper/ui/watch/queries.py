"""What a watcher asks of a run's store: once at the beginning, and then only for what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.telemetry.events import (
    EpisodeEnded,
    EpisodeStarted,
    LifecycleTransition,
    NetworkEvent,
    RolledBack,
    StepTaken,
    event_types,
)
from esper.telemetry.metric import Metric
from esper.telemetry.reader import EventRecord, RunReader

RECENT = 300
"""Events of each type that are kept for display."""
EPOCHS = 5000
"""Of a model that grows alone, that are read back."""
FOLLOWED = tuple(kind.name for kind in (EpisodeStarted, StepTaken, LifecycleTransition, RolledBack, EpisodeEnded))
"""Types of events that tell how networks stand."""
_LEARNING = (
    *("objective", "accuracy", "added", "rollbacks", "probe_score"),
    *("ppo/entropy", "ppo/kl", "ppo/explained_variance", "ppo/clip_fraction"),
)
_GROWTH = ("validation_loss", "train_loss", "added_parameters")


def curves(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Scalars of a run that are shown."""
    if not grows_alone(metadata):
        return _LEARNING if metadata.get("command") == "train" else ()
    about = Metric.of(metadata)
    return tuple(dict.fromkeys([about.scalar, about.train_scalar, *_GROWTH]))


def standing(reader: RunReader, grows_alone: bool, up_to: int) -> list[EventRecord]:
    """The events up to an id that tell how a run stands: the newest episode's, and the newest of each type."""
    found = {record.id: record for name in event_types() for record in reader.newest(name, RECENT)}
    for record in _of_one_model(reader) if grows_alone else _of_newest_episode(reader):
        found[record.id] = record
    return [found[key] for key in sorted(found) if key <= up_to]


def network_events(reader: RunReader, records: list[EventRecord]) -> list[NetworkEvent]:
    """Those that tell how networks stand; RunError if one of them is damaged or of an unknown version."""
    events = (reader.decoded(record) for record in records if record.type in FOLLOWED)
    return [event for event in events if isinstance(event, NetworkEvent)]


def new_points(
    reader: RunReader, metadata: Mapping[str, Any], known: Mapping[str, int]
) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) of the scalars that are shown, after the last known iteration of each."""
    return {name: reader.series(name, known.get(name, -1)) for name in curves(metadata)}


def grows_alone(metadata: Mapping[str, Any]) -> bool:
    """Whether the run is one of `esper grow`."""
    return metadata.get("command") == "grow"


def _of_newest_episode(reader: RunReader) -> list[EventRecord]:
    """Of the newest one with decisions, and of the one that has just begun."""
    newest = [*reader.newest(StepTaken.name), *reader.newest(EpisodeStarted.name)]
    return [record for number in {one.iteration for one in newest} for record in reader.records_at(number, FOLLOWED)]


def _of_one_model(reader: RunReader) -> list[EventRecord]:
    return [record for name in FOLLOWED for record in reader.newest(name, EPOCHS)]
