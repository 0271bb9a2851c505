"""What is measured of E networks after training: training reports, and evaluations with contributions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from esper.engine.gradients import HealthTable
from esper.lifecycle.table import SeedMeasurements, SeedTable
from esper.numerics.arrays import Bools, Floats

WORST_SCORE = -1.0
"""Lower bound of the score of a loss, so that one diverged network does not outweigh all others."""
TINY = 1e-8
"""Least loss that others are divided by."""


def score_losses(losses: Floats, chance_loss: float) -> Floats:
    """``1 - loss / chance_loss``, the fraction of a guess's loss that is removed, at least `WORST_SCORE`."""
    return np.fmax(1 - losses / chance_loss, WORST_SCORE)


@dataclass(frozen=True)
class TrainingReport:
    """Training since the last decision, per network."""

    loss: Floats
    """Mean cross-entropy in nats over the minibatches, ``[E]``."""
    accuracy: Floats
    """Mean over the minibatches, ``[E]``; NaN where it is not known."""
    host_gradient: Floats
    """Norm of the hosts' gradients in the last minibatch, ``[E]``."""
    seed_gradient: Floats
    """Norm of the modules' gradients in the last minibatch, ``[E, S]``; 0 without a module that learns."""
    health: HealthTable
    """The modules' gradients over all minibatches, ``[E, S]``; resting networks have no module that learns."""


@dataclass(frozen=True)
class Evaluation:
    """Networks on validation data. Losses in nats, accuracies in [0, 1]."""

    loss: Floats
    """``[E]``."""
    accuracy: Floats
    """The score that growth is about, ``[E]``: the accuracy, or what takes its place."""
    accuracy_contribution: Floats
    """``[E, S]``: accuracy with the slot's module less accuracy without it; NaN in empty slots, and where it is not
    known. Without it means with the module switched off, or a refitted fork of the network."""
    loss_contribution: Floats
    """``[E, S]``: loss without the slot's module less loss with it; NaN in the same slots."""
    accuracy_error: Floats
    """``[E, S]``: standard error of ``accuracy_contribution`` over validation examples; NaN where it is not known."""
    loss_error: Floats
    """``[E, S]``: standard error of ``loss_contribution``; NaN where it is not known."""
    fresh: Bools
    """``[E, S]``: whether contributions were measured now; elsewhere they are as last known."""
    progress: Floats | None = None
    """What must fall for an episode to make progress, ``[E]``; None: the loss."""
    skill: Floats | None = None
    """After training, by M measures: 0 for guessing, 1 for perfection; NaN where unknown, ``[E, M]``."""
    finite: Bools | None = None
    """After training: whether all losses, gradients, parameters and moments are finite, ``[E]``."""
    diverged: Bools | None = None
    """After training: whether the loss is unusual whatever it was before, ``[E]``; None: of no network."""

    def divide_by_loss(self, values: Floats) -> Floats:
        """Values ``[E, S]`` as shares of the present loss."""
        return values / np.maximum(np.abs(self.loss), TINY)[:, None]

    def fill_missing(self, **earlier: Floats) -> Evaluation:
        """This evaluation with ``earlier`` contributions and errors ``[E, S]``, by field, where none are fresh."""
        return replace(
            self, **{name: np.where(self.fresh, getattr(self, name), values) for name, values in earlier.items()}
        )

    def score_losses(self, chance_loss: float) -> Evaluation:
        """This evaluation with the score of the loss in place of the accuracy.

        A loss beyond twice that of guessing, and one that is not a number, counts as twice that; contributions are at
        most as large as that range.
        """
        largest = 1 - WORST_SCORE
        return replace(
            self,
            accuracy=score_losses(self.loss, chance_loss),
            accuracy_contribution=np.clip(self.loss_contribution / chance_loss, -largest, largest),
            accuracy_error=self.loss_error / chance_loss,
        )


@dataclass(frozen=True)
class CommittedEvaluation:
    """The networks without their unfinished modules, on validation data; both ``[E]``."""

    accuracy: Floats
    loss: Floats
    """Loss in nats."""

    def score_losses(self, chance_loss: float) -> CommittedEvaluation:
        """The evaluation with losses as scores, as `Evaluation.score_losses` computes them."""
        return replace(self, accuracy=score_losses(self.loss, chance_loss))


def update_measurements(table: SeedTable, before: SeedMeasurements, evaluation: Evaluation) -> SeedMeasurements:
    """The measurements for the next decision, from the measurements ``before`` and the newest evaluation."""
    known = np.isfinite(evaluation.loss_contribution)
    # Modules that do not count yet are computed all the same, at alpha 0: were one not finite, the loss would not be.
    finite = np.where(evaluation.fresh, known, np.isfinite(evaluation.loss)[:, None])
    measured = table.owning & known
    stale = measured & ~evaluation.fresh
    return replace(
        before,
        probed=before.probed | (table.owning & finite),
        contribution=np.where(measured, evaluation.accuracy_contribution, np.nan).astype(np.float32),
        contribution_age=np.where(stale, before.contribution_age + np.int16(1), np.int16(0)),
    )
