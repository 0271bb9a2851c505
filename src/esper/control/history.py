"""What happened so far in each network's episode, as far as a controller may remember it."""

from __future__ import annotations

from typing import Any

import numpy as np

from esper.engine.gradients import HealthTable
from esper.engine.measurements import Evaluation, TrainingReport
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.numerics.arrays import Bools, Floats, Ints, replace_where
from esper.serialization.state_files import from_plain, to_plain

LOOKBACK = 3
"""Steps over which recent changes are measured."""
PLATEAU_IMPROVEMENT = 0.01
"""Relative decrease of the validation loss below which a step counts as plateau."""


def improves(value: Floats, best: Floats) -> Bools:
    """Whether ``value``, better the lower it is, is less than ``best`` by more than `PLATEAU_IMPROVEMENT`.

    Both may be negative, as the losses of densities are.
    """
    return value < best * (1 - np.sign(best) * PLATEAU_IMPROVEMENT)


class History:
    """The record of E episodes; `record` adds a step, `restart` forgets some episodes.

    ``chance_loss`` and ``chance_accuracy`` are those of networks that guess.
    """

    def __init__(
        self, environments: int, slots: int, blueprints: int, chance_loss: float, chance_accuracy: float
    ) -> None:
        self._shape = (environments, slots, blueprints)
        self._chance_loss, self._chance_accuracy = chance_loss, chance_accuracy
        everyone = np.ones(environments, bool)
        self.training = self._report_guessing()
        self.losses: Floats = np.zeros((environments, LOOKBACK + 1))
        """Validation losses of the last steps, the newest first."""
        self.accuracies: Floats = np.zeros((environments, LOOKBACK + 1))
        self.best_loss: Floats = np.zeros(environments)
        self.plateau_age: Floats = np.zeros(environments)
        """Steps since the validation loss last improved by more than `PLATEAU_IMPROVEMENT`, or as `record` was told."""
        self.accuracy_contribution: Floats = np.zeros((environments, slots))
        self.loss_contribution: Floats = np.zeros((environments, slots))
        self.loss_contribution_before: Floats = np.zeros((environments, slots))
        """The loss contribution as it was measured the time before."""
        self.tries: Floats = np.zeros(self._shape)
        """How often each blueprint was germinated in each slot, ``[E, S, K]``."""
        self.outcomes: Floats = np.zeros(self._shape)
        """The loss contribution each blueprint last had in each slot, 0 if never measured, ``[E, S, K]``."""
        self.last_op: Ints = np.zeros(environments, np.int64)
        self.restart(everyone)

    @property
    def chance_loss(self) -> float:
        """Loss of networks that guess."""
        return self._chance_loss

    def expect(self, chance_loss: float, chance_accuracy: float) -> None:
        """Begin anew where those of networks that guess are others than was thought."""
        if (self._chance_loss, self._chance_accuracy) != (chance_loss, chance_accuracy):
            self._chance_loss, self._chance_accuracy = chance_loss, chance_accuracy
            self.restart(np.ones(len(self.losses), np.bool_))

    def restart(self, rows: Bools) -> None:
        """Forget the episodes ``rows``, bool ``[E]``."""
        self.training = replace_where(rows, self.training, self._report_guessing())
        self.losses[rows] = self._chance_loss
        self.accuracies[rows] = self._chance_accuracy
        self.best_loss[rows] = self._chance_loss
        self.plateau_age[rows] = 0
        for array in (self.accuracy_contribution, self.loss_contribution, self.loss_contribution_before):
            array[rows] = np.nan
        self.tries[rows] = 0
        self.outcomes[rows] = 0
        self.last_op[rows] = Op.WAIT

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, as plain values."""
        return to_plain(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` gave.

        Raises:
            CheckpointError: it is of episodes of another shape.
        """
        vars(self).update(from_plain(vars(self), state, "history"))

    def _report_guessing(self) -> TrainingReport:
        """A report as of networks that guess."""
        environments, slots, _ = self._shape
        return TrainingReport(
            np.full(environments, self._chance_loss),
            np.full(environments, self._chance_accuracy),
            np.zeros(environments),
            np.zeros((environments, slots)),
            HealthTable.none(environments, slots),
        )

    def complete(self, evaluation: Evaluation, evidence: Evidence) -> Evaluation:
        """Fill in contributions that were not measured, as last known of these seeds."""
        measured = np.isfinite(evidence.contribution)
        return evaluation.fill_missing(
            np.where(measured, self.accuracy_contribution, np.nan), np.where(measured, self.loss_contribution, np.nan)
        )

    def record(
        self,
        actions: Ints,
        table: SeedTable,
        training: TrainingReport,
        evaluation: Evaluation,
        improved: Bools | None = None,
    ) -> None:
        """Add a step: the actions ``[E, 8]`` taken, the table they led to and what was then measured.

        ``improved``, bool ``[E]``, says whether this was progress; None: it was where the validation loss improved.
        """
        self.training = training
        self.losses = np.concatenate([evaluation.loss[:, None], self.losses[:, :-1]], axis=1)
        self.accuracies = np.concatenate([evaluation.accuracy[:, None], self.accuracies[:, :-1]], axis=1)
        lower = improves(evaluation.loss, self.best_loss)
        self.best_loss = np.where(lower, evaluation.loss, self.best_loss)
        self.plateau_age = np.where(lower if improved is None else improved, 0, self.plateau_age + 1)
        self.accuracy_contribution = evaluation.accuracy_contribution
        before, fresh = self.loss_contribution, evaluation.fresh
        self.loss_contribution_before = np.where(fresh, before, self.loss_contribution_before)
        self.loss_contribution = evaluation.loss_contribution
        self.last_op = actions[:, Head.OP].copy()
        germinating = (self.last_op == Op.GERMINATE).nonzero()[0]
        self.tries[germinating, actions[germinating, Head.SLOT], actions[germinating, Head.BLUEPRINT]] += 1
        measured = np.isfinite(evaluation.loss_contribution) & (table.blueprint != NO_BLUEPRINT)
        environment, slot = measured.nonzero()
        blueprint = table.blueprint[environment, slot]
        self.outcomes[environment, slot, blueprint] = evaluation.loss_contribution[environment, slot]
