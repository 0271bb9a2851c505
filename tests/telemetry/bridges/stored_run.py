"""A run store that a test fills by hand, as training would."""

from __future__ import annotations

import math
from pathlib import Path

from esper.telemetry.events import (
    AnomalyRaised,
    EpisodeEnded,
    LifecycleTransition,
    PPOUpdated,
    RolledBack,
    RunEnded,
    RunResumed,
    RunStarted,
)
from esper.telemetry.store import RunStore

NAN_AT = 2
"""The iteration whose figure is not a number."""


def begin(path: Path) -> RunStore:
    store = RunStore.create(path)
    store.set_metadata({"command": "train", "seed": 3, "slots": ["layer0", "layer1"]})
    store.emit(RunStarted(0, "0.1.0", 3))
    store.flush()
    return store


def iterate(store: RunStore, number: int, closed: bool = True) -> None:
    """An iteration with two germinations, two kept seeds, a rollback and an anomaly."""
    for environment in range(2):
        place = number, number, environment, 0
        store.emit(LifecycleTransition(*place, 0, "dormant", "germinated", "norm", "germinate", "no_gate"))
        store.emit(LifecycleTransition(*place, 0, "holding", "fossilized", "norm", "fossilize", "passed", 0.25))
        store.emit(EpisodeEnded(*place, number / 10, 0.5, 0.1, 0.4, ("norm", None)))
    store.emit(RolledBack(number, number, 0, 1, "exploded", 9.0, 0.1, 1.0, 0.5, (0,), False))
    store.flush()
    if closed:
        figures = {"objective": number / 7, "objective/plain": 1.0, "value": math.nan if number == NAN_AT else 1.0}
        store.scalars(number, figures)
        store.emit(AnomalyRaised(number, "kl_high", f"the policy moved too far in {number}"))
        store.emit(PPOUpdated(number, 4, False, 0.1, ("kl_high",), {}))
        store.flush()


def resume(store: RunStore, iteration: int) -> None:
    store.rewind(iteration)
    store.emit(RunResumed(iteration, "0.1.0"))
    store.flush()


def end(store: RunStore, iteration: int) -> None:
    store.emit(RunEnded(iteration, 1.5))
    store.flush()
