"""What the store of `esper grow` keeps besides its decisions."""

from __future__ import annotations

from typing import Any

from esper.grower.practice.growth import Epoch
from esper.grower.practice.settings import GrowSettings
from esper.telemetry.store import RunStore

FLOPS, LEARNING_SECONDS, SECONDS = "training_flops", "learning_seconds", "seconds"
"""Scalars that a run's totals are the sums of."""


def described(settings: GrowSettings) -> dict[str, Any]:
    """What the metadata of the run store say about the run, by key."""
    return {
        "task": settings.task,
        "host": settings.host,
        "controller": settings.controller,
        "evidence": settings.evidence.value,
        "iterations": settings.epochs,
        "steps": settings.epochs,
    }


def figures(epoch: Epoch) -> dict[str, float]:
    """What an epoch cost, by scalar."""
    return {FLOPS: epoch.training_flops, LEARNING_SECONDS: epoch.learning_seconds, SECONDS: epoch.seconds}


def total(store: RunStore, name: str) -> float:
    """The sum of a scalar over all epochs."""
    return sum(value for _, value in store.series(name))
