"""The history of each network's episode, as far as observations depend on it."""

from typing import Any

import numpy as np

from esper.engine.gradients import HealthTable
from esper.engine.measurements import Evaluation, TrainingReport
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.table import NO_BLUEPRINT, SeedMeasurements, SeedTable
from esper.numerics.arrays import Bools, Floats, Ints, replace_where
from esper.serialization import from_plain, to_plain

LOOKBACK = 3
"""Steps over which recent changes are measured."""
PLATEAU_IMPROVEMENT = 0.01
"""Relative decrease of the validation loss below which a step counts as plateau."""


def improves(value: Floats, best: Floats) -> Bools:
    """Whether ``value`` is lower than ``best`` by more than `PLATEAU_IMPROVEMENT` of its size; both may be negative."""
    return value < best * (1 - np.sign(best) * PLATEAU_IMPROVEMENT)


class History:
    """The history of E episodes: `record` adds a step, `restart` resets some episodes.

    Before the first step all networks are at chance, with the ``chance_loss`` and ``chance_accuracy`` of guessing.
    """

    def __init__(
        self, environments: int, slots: int, blueprints: int, chance_loss: float, chance_accuracy: float
    ) -> None:
        # Attributes, by name, are what checkpoints store.
        self._shape = (environments, slots, blueprints)
        self._chance_loss, self._chance_accuracy = chance_loss, chance_accuracy
        self.training = self._report_chance()
        """The last report on training."""
        self.losses: Floats = np.zeros((environments, LOOKBACK + 1))
        """Validation losses of the last steps, the newest first."""
        self.accuracies: Floats = np.zeros((environments, LOOKBACK + 1))
        self.best_loss: Floats = np.zeros(environments)
        self.best_progress: Floats = np.zeros(environments)
        """The least `Evaluation.progress` at which there was progress, where an evaluation has one."""
        self.plateau_age: Floats = np.zeros(environments)
        """Steps since the loss, or `Evaluation.progress`, last improved by more than `PLATEAU_IMPROVEMENT`."""
        # Contributions as in the last `Evaluation`, with their standard errors, and those to the loss one measurement
        # before, ``[E, S]``.
        self.accuracy_contribution: Floats = np.zeros((environments, slots))
        self.loss_contribution: Floats = np.zeros((environments, slots))
        self.loss_contribution_before: Floats = np.zeros((environments, slots))
        self.accuracy_error: Floats = np.zeros((environments, slots))
        self.loss_error: Floats = np.zeros((environments, slots))
        self.tries: Floats = np.zeros(self._shape)
        """Number of germinations of each blueprint in each slot, ``[E, S, K]``."""
        self.outcomes: Floats = np.zeros(self._shape)
        """Last loss contribution of each blueprint in each slot, 0 if never measured, ``[E, S, K]``."""
        self.last_op: Ints = np.zeros(environments, np.int64)
        self.restart(np.ones(environments, np.bool_))

    @property
    def chance_loss(self) -> float:
        """The loss of guessing."""
        return self._chance_loss

    def set_chance_level(self, chance_loss: float, chance_accuracy: float) -> None:
        """Set loss and accuracy of guessing; a change of either resets all episodes."""
        if (self._chance_loss, self._chance_accuracy) != (chance_loss, chance_accuracy):
            self._chance_loss, self._chance_accuracy = chance_loss, chance_accuracy
            self.restart(np.ones(len(self.losses), np.bool_))

    def restart(self, rows: Bools) -> None:
        """Reset the episodes ``rows``, bool ``[E]``."""
        self.training = replace_where(rows, self.training, self._report_chance())
        self.losses[rows] = self._chance_loss
        self.accuracies[rows] = self._chance_accuracy
        self.best_loss[rows] = self._chance_loss
        self.best_progress[rows] = np.inf
        self.plateau_age[rows] = 0
        for contributions in (self.accuracy_contribution, self.loss_contribution, self.loss_contribution_before):
            contributions[rows] = np.nan
        for errors in (self.accuracy_error, self.loss_error):
            errors[rows] = np.nan
        self.tries[rows] = 0
        self.outcomes[rows] = 0
        self.last_op[rows] = Op.WAIT

    def state_dict(self) -> dict[str, Any]:
        """All attributes, as plain values."""
        return to_plain(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(from_plain(vars(self), state, "history"))

    def _report_chance(self) -> TrainingReport:
        """The report of networks at chance."""
        environments, slots, _ = self._shape
        return TrainingReport(
            np.full(environments, self._chance_loss),
            np.full(environments, self._chance_accuracy),
            np.zeros(environments),
            np.zeros((environments, slots)),
            HealthTable.none(environments, slots),
        )

    def fill_stale_contributions(self, evaluation: Evaluation, measurements: SeedMeasurements) -> Evaluation:
        """Fill contributions that are not fresh with the last ones of the same seeds, and NaN if there are none."""
        # They are finite exactly where the resident seed was measured before.
        measured = np.isfinite(measurements.contribution)
        names = "accuracy_contribution", "loss_contribution", "accuracy_error", "loss_error"
        return evaluation.fill_missing(**{name: np.where(measured, getattr(self, name), np.nan) for name in names})

    def record(self, actions: Ints, table: SeedTable, training: TrainingReport, evaluation: Evaluation) -> None:
        """Add a step: the actions ``[E, 8]`` taken, the table after them, and what was measured then."""
        self.training = training
        self.losses = np.concatenate([evaluation.loss[:, None], self.losses[:, :-1]], axis=1)
        self.accuracies = np.concatenate([evaluation.accuracy[:, None], self.accuracies[:, :-1]], axis=1)
        # A plateau ends where the validation loss improves, or the metric that stands for progress.
        improved = improves(evaluation.loss, self.best_loss)
        self.best_loss = np.where(improved, evaluation.loss, self.best_loss)
        if evaluation.progress is not None:
            improved = improves(evaluation.progress, self.best_progress)
            self.best_progress = np.where(improved, evaluation.progress, self.best_progress)
        self.plateau_age = np.where(improved, 0, self.plateau_age + 1)
        self.accuracy_contribution = evaluation.accuracy_contribution
        # Contributions that were not measured anew keep the comparison with the measurement before.
        before = self.loss_contribution_before
        self.loss_contribution_before = np.where(evaluation.fresh, self.loss_contribution, before)
        self.loss_contribution = evaluation.loss_contribution
        self.accuracy_error, self.loss_error = evaluation.accuracy_error, evaluation.loss_error

        # Count the tries of every blueprint, and keep the last outcome of those that are resident.
        self.last_op = actions[:, Head.OP].copy()
        germinating = (self.last_op == Op.GERMINATE).nonzero()[0]
        self.tries[germinating, actions[germinating, Head.SLOT], actions[germinating, Head.BLUEPRINT]] += 1
        measured = np.isfinite(evaluation.loss_contribution) & (table.blueprint != NO_BLUEPRINT)
        at = measured.nonzero()
        self.outcomes[(*at, table.blueprint[at])] = evaluation.loss_contribution[at]
