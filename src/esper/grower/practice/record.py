"""What a run's store keeps of an epoch, and what it says of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from esper.grower.decision import Change
from esper.grower.finishing import Ending
from esper.grower.practice.growth import Epoch, Growth
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause
from esper.telemetry.events import LifecycleTransition, NetworkEvent, RolledBack, StepTaken
from esper.telemetry.store import RunStore
from esper.training.governor.model import Rollback

FLOPS, LEARNING_SECONDS, SECONDS = "training_flops", "learning_seconds", "seconds"
"""Scalars that a run's totals are the sums of."""
_EPISODE, _ENVIRONMENT = 1, 0
"""There is but one of each."""


def described(growth: Growth) -> dict[str, Any]:
    """What the metadata of the run store say about the run, by key."""
    settings, grower = growth.settings, growth.grower
    return {
        "command": "grow",
        "seed": settings.seed,
        "task": settings.task,
        "host": settings.host,
        "controller": settings.controller,
        "environments": 1,
        "iterations": settings.epochs,
        "steps": settings.epochs,
        "slots": list(growth.model.slots),
        "blueprints": [kind.name for kind in grower.subject.roster.kinds],
    }


def record(store: RunStore, epoch: Epoch, growth: Growth) -> None:
    """Keep an epoch, durably."""
    number, decision, slots = epoch.number, epoch.decision, list(growth.model.slots)
    contributions = {f"contribution/{slot}": value for slot, value in decision.contributions.items()}
    store.scalars(number, {**_figures(epoch), **contributions})
    if decision.rollback is not None:
        store.emit(_rolled_back(epoch, decision.rollback, slots))
    for change in decision.changes:
        store.emit(_changed(number, change, decision.contributions, slots))
    store.emit(_decided(epoch, growth, slots))
    store.flush()


def record_ending(store: RunStore, number: int, ending: Ending, slots: list[str]) -> None:
    """Keep how growth ended after the epoch of that number, unless it is kept already."""
    known = store.events(LifecycleTransition)
    if any(event.cause == Cause.FINISH.name.lower() for event in known):  # by a run that was killed before its result
        return
    for change in ending.changes:
        store.emit(_changed(number, change, ending.contributions, slots))


def total(store: RunStore, name: str) -> float:
    """The sum of a scalar over all epochs."""
    return sum(value for _, value in store.series(name))


def _place(number: int) -> tuple[int, int, int, int]:
    """The first fields of a `NetworkEvent` in the epoch of that number."""
    return number, _EPISODE, _ENVIRONMENT, number - 1


def _figures(epoch: Epoch) -> dict[str, float]:
    return {
        "train_loss": epoch.learned.loss,
        "train_accuracy": epoch.learned.accuracy,
        "validation_loss": epoch.validation.loss,
        "validation_accuracy": epoch.validation.accuracy,
        "added_parameters": epoch.added_parameters,
        FLOPS: epoch.training_flops,
        LEARNING_SECONDS: epoch.learning_seconds,
        SECONDS: epoch.seconds,
    }


def _decided(epoch: Epoch, growth: Growth, slots: list[str]) -> NetworkEvent:
    decision, validation = epoch.decision, epoch.validation
    table, blueprints = growth.grower.subject.table, growth.grower.subject.roster.kinds
    residents = cast("list[int]", table.blueprint[0].tolist())
    added = epoch.added_parameters / growth.model.host_parameters
    return StepTaken(
        *_place(epoch.number),
        op=decision.op.name.lower(),
        slot=None if decision.slot is None else slots.index(decision.slot),
        blueprint=decision.blueprint,
        train_loss=epoch.learned.loss,
        loss=validation.loss,
        accuracy=validation.accuracy,
        objective=validation.accuracy - growth.settings.rent * math.log1p(added),
        added=added,
        stages=tuple(Stage(stage).name.lower() for stage in table.stage[0]),
        blueprints=tuple(None if index < 0 else blueprints[index].name for index in residents),
        alphas=tuple(table.alpha[0].tolist()),
        contributions=tuple(decision.contributions.get(slot) for slot in slots),
    )


def _changed(number: int, change: Change, contributions: Mapping[str, float], slots: list[str]) -> NetworkEvent:
    return LifecycleTransition(
        *_place(number),
        slot=slots.index(change.slot),
        before=change.before.name.lower(),
        after=change.after.name.lower(),
        blueprint=change.blueprint,
        cause=change.cause.name.lower(),
        reason=change.reason.name.lower(),
        contribution=contributions.get(change.slot),
    )


def _rolled_back(epoch: Epoch, rollback: Rollback, slots: list[str]) -> NetworkEvent:
    return RolledBack(
        *_place(epoch.number),
        trouble=rollback.trouble.name.lower(),
        loss_before=rollback.loss,
        accuracy_before=epoch.validation.accuracy,
        loss_after=rollback.loss_restored,
        accuracy_after=math.nan,
        pruned=tuple(slots.index(name) for name in rollback.pruned),
        ended=False,
    )
