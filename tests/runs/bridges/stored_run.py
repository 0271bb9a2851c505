"""A run store that a test fills by hand, as training would."""

from __future__ import annotations

import math
from pathlib import Path

from esper.runs.events import (
    AnomalyRaised,
    EpisodeEnded,
    LifecycleTransition,
    Place,
    PPOUpdated,
    RolledBack,
    RunEnded,
    RunResumed,
    RunStarted,
)
from esper.runs.store import RunStore

NAN_AT = 2
"""The iteration whose figure is not a number."""


def begin(path: Path) -> RunStore:
    store = RunStore.create(path)
    store.set_metadata({"command": "train", "seed": 3, "slots": ["layer0", "layer1"]})
    store.emit(RunStarted(iteration=0, esper_version="0.1.0", seed=3))
    store.flush()
    return store


def iterate(store: RunStore, number: int, closed: bool = True) -> None:
    """An iteration with two germinations, two kept seeds, a rollback and an anomaly."""
    for environment in range(2):
        place = Place(iteration=number, episode=number, environment=environment, step=0)
        store.emit(
            LifecycleTransition(
                **place,
                slot=0,
                before="dormant",
                after="germinated",
                blueprint="norm",
                cause="germinate",
                reason="no_gate",
            )
        )
        store.emit(
            LifecycleTransition(
                **place,
                slot=0,
                before="holding",
                after="fossilized",
                blueprint="norm",
                cause="fossilize",
                reason="passed",
                contribution=0.25,
            )
        )
        store.emit(EpisodeEnded(**place, objective=number / 10, accuracy=0.5, added=0.1, paid=0.4, kept=("norm", None)))
    store.emit(
        RolledBack(
            iteration=number,
            episode=number,
            environment=0,
            step=1,
            trouble="exploded",
            loss_before=9.0,
            metric_before=0.1,
            loss_after=1.0,
            metric_after=0.5,
            pruned=(0,),
            ended=False,
        )
    )
    store.flush()
    if closed:
        figures = {"objective": number / 7, "objective/plain": 1.0, "value": math.nan if number == NAN_AT else 1.0}
        store.scalars(number, figures)
        store.emit(AnomalyRaised(iteration=number, anomaly="kl_high", meaning=f"the policy moved too far in {number}"))
        store.emit(
            PPOUpdated(
                iteration=number, optimizer_steps=4, stopped_early=False, kl=0.1, anomalies=("kl_high",), metrics={}
            )
        )
        store.flush()


def resume(store: RunStore, iteration: int) -> None:
    store.rewind(iteration)
    store.emit(RunResumed(iteration=iteration, esper_version="0.1.0"))
    store.flush()


def end(store: RunStore, iteration: int) -> None:
    store.emit(RunEnded(iteration=iteration, seconds=1.5))
    store.flush()
