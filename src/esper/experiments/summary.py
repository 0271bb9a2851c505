"""A training run in a few figures, from its store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from esper.experiments.trainer import LEVELS
from esper.telemetry.reader import RunReader

RECENT = 10
"""Iterations over which the objective at the end is averaged."""


@dataclass(frozen=True)
class TrainingSummary:
    """What a training run came to, all its processes taken together."""

    iterations: int
    """Iterations done."""
    objective: float | None
    """Mean J of the last rollouts, the policy exploring; None before the first iteration."""
    probe_score: float | None
    """Mean test score of the greedy policy on the probe instances at its last measurement."""
    baselines: dict[str, float]
    """Mean score of each baseline on the same instances."""
    seconds: float
    """Spent on iterations."""
    environment_steps: int

    @property
    def environment_steps_per_second(self) -> float:
        """0 before the first iteration."""
        return self.environment_steps / self.seconds if self.seconds else 0.0


def summarise(reader: RunReader) -> TrainingSummary:
    """The run's figures so far; what the reader's store has not flushed is not in them."""
    objective = [value for _, value in reader.series("objective")]
    probe = [value for _, value in reader.series("probe_score")]
    return TrainingSummary(
        reader.last_iteration(),
        float(np.mean(objective[-RECENT:])) if objective else None,
        probe[-1] if probe else None,
        reader.metadata().get(LEVELS, {}),
        sum(value for _, value in reader.series("seconds")),
        int(sum(value for _, value in reader.series("environment_steps"))),
    )
