"""What the metadata of a run store say about a training run, so that its events can be read without Esper."""

from __future__ import annotations

from typing import Any

from esper.control.observation import BLUEPRINT_FEATURES, GLOBAL_FEATURES, SLOT_FEATURES
from esper.experiments.settings import TrainSettings
from esper.lifecycle.actions import Head, Op
from esper.tasks.registry import get_suite


def described(settings: TrainSettings) -> dict[str, Any]:
    """Metadata by key; lists are indexed by the numbers that events use."""
    suite = get_suite(settings.suite)
    return {
        "command": "train",
        "seed": settings.seed,
        "suite": suite.name,
        "environments": settings.environments,
        "iterations": settings.iterations,
        "steps": suite.steps,
        "slots": list(suite.sites),
        "blueprints": list(suite.blueprints),
        "operations": [op.name.lower() for op in Op],
        "heads": [head.name.lower() for head in Head],
        "features": {
            "globals": [feature.name for feature in GLOBAL_FEATURES],
            "slots": [feature.name for feature in SLOT_FEATURES],
            "blueprints": [feature.name for feature in BLUEPRINT_FEATURES],
        },
    }
