"""Records of what the governor did in an episode."""

from __future__ import annotations

from dataclasses import dataclass

from esper.training.evaluation import Evaluation
from esper.training.governor import Trouble
from esper.training.governor.population import Intervention


@dataclass(frozen=True)
class Incident:
    """One rollback of one network; losses in nats and accuracies on validation data."""

    environment: int
    trouble: str
    """Name of a `Trouble`, in lower case."""
    loss_before: float
    accuracy_before: float
    loss_after: float
    accuracy_after: float
    pruned: tuple[int, ...]
    """Slots whose seeds are gone."""
    ended: bool
    """Whether it was one rollback too many, so that the episode has ended."""


def incidents(intervention: Intervention, before: Evaluation, after: Evaluation) -> list[Incident]:
    """One record per network that was rolled back."""
    changes = intervention.transitions
    return [
        Incident(
            row,
            Trouble(intervention.trouble[row]).name.lower(),
            float(before.loss[row]),
            float(before.accuracy[row]),
            float(after.loss[row]),
            float(after.accuracy[row]),
            tuple(changes.slot[changes.env == row].tolist()),
            bool(intervention.exhausted[row]),
        )
        for row in intervention.rows.nonzero()[0].tolist()
    ]
