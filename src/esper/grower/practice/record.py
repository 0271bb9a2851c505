"""What a run's store keeps of an epoch, and what it says of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper.grower.practice.growth import Epoch
from esper.telemetry.events import Decided, LifecycleTransition, RolledBack
from esper.telemetry.store import RunStore
from esper.training.governor.model import Rollback

FLOPS, LEARNING_SECONDS, SECONDS = "training_flops", "learning_seconds", "seconds"
"""Scalars that a run's totals are the sums of."""


def record(store: RunStore, epoch: Epoch, slots: Sequence[str]) -> None:
    """Keep an epoch, durably. ``slots`` are the names of all."""
    number, decision = epoch.number, epoch.decision
    contributions = {f"contribution/{slot}": value for slot, value in decision.contributions.items()}
    store.scalars(number, {**_figures(epoch), **contributions})
    store.emit(Decided(number, decision.op.name, decision.slot, decision.blueprint))
    for change in decision.changes:
        place, cause = slots.index(change.slot), change.cause.name
        before, after = change.before.name, change.after.name
        store.emit(LifecycleTransition(number, 0, number, place, before, after, change.blueprint, cause, reason=""))
    if decision.rollback is not None:
        store.emit(_rolled_back(epoch, decision.rollback, slots))
    store.flush()


def total(store: RunStore, name: str) -> float:
    """The sum of a scalar over all epochs."""
    return sum(value for _, value in store.series(name))


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


def _rolled_back(epoch: Epoch, rollback: Rollback, slots: Sequence[str]) -> RolledBack:
    return RolledBack(
        epoch.number,
        environment=0,
        step=epoch.number,
        trouble=rollback.trouble.name,
        loss_before=rollback.loss,
        accuracy_before=epoch.validation.accuracy,
        loss_after=rollback.loss_restored,
        accuracy_after=math.nan,
        pruned=tuple(slots.index(name) for name in rollback.pruned),
        ended=False,
    )
