"""The governor of one growth: whether training is to be undone, and what comes back; the same in all processes."""

from __future__ import annotations

import numpy as np
import torch

from esper.grower.distributed import Processes
from esper.grower.measuring import Measurement
from esper.grower.network import GrowingNetwork
from esper.grower.scores import Scores
from esper.grower.watch import OptimizerCheck, TrainingWatch
from esper.lifecycle.actions import Op
from esper.lifecycle.transitions import Transitions
from esper.population.governor.detectors import GovernorSettings
from esper.population.governor.model import Governor, GovernorVerdict, Rollback


class Oversight:
    """Judges training by what was measured, and undoes what blew up; without a governor it does neither.

    Args:
        network: The model with its lifecycle table.
        optimizer: That trains it.
        settings: Of the governor; None: there is none.
        scores: Of what is measured.
        processes: Those that the growth is in; the first one's verdict holds.
        scaled: Whether losses are scaled.
    """

    def __init__(
        self,
        network: GrowingNetwork,
        optimizer: torch.optim.Optimizer,
        settings: GovernorSettings | None,
        scores: Scores,
        processes: Processes,
        *,
        scaled: bool,
    ) -> None:
        self._network, self._processes = network, processes
        self.trained = OptimizerCheck(network.model.host, optimizer)
        """Whether the optimizer is what trains the model."""
        self.governor = None if settings is None else Governor(network.model, optimizer, settings)
        self.watch = None if self.governor is None else TrainingWatch(self.governor, scores, scaled=scaled)
        """By which the governor is told what is wrong."""

    @property
    def rollbacks_used(self) -> float:
        """The share of the allowed rollbacks that there have been, in [0, 1]."""
        return 0.0 if self.governor is None else self.governor.rollbacks_used

    def is_measurable(self, train_loss: float) -> bool:
        """Whether all that should be finite is; without a governor nobody looks."""
        watch = self.watch
        return watch is None or self._processes.agree_on_model(lambda: watch.finite(train_loss))

    def judge(self, train_loss: float, found: Measurement | None) -> GovernorVerdict | None:
        """The verdict on a model of which that was ``found``; None: it could not be measured."""
        watch = self.watch
        if watch is None:
            return None
        if found is None:
            return self._processes.agree(lambda: watch.judge_broken(train_loss))
        return self._processes.agree(lambda: watch.judge(train_loss, found.usual, blind=found.blind))

    def find_barred(
        self, verdict: GovernorVerdict | None, train_loss: float, found: Measurement, *, idle: bool
    ) -> tuple[Op, ...]:
        """Operations for which there are no grounds now; ``idle`` if all gradients are zero."""
        if self.watch is None or verdict is None:
            return ()
        return self.watch.find_barred(verdict, train_loss, found.usual, blind=found.blind, idle=idle)

    def undo(self, verdict: GovernorVerdict | None) -> tuple[Rollback | None, Transitions]:
        """Undo the training since the last good state, if it blew up.

        Raises:
            DivergedError: it did so more often than the governor allows; the model is restored all the same.
        """
        governor = self.governor
        if governor is None or verdict is None or not governor.accept(verdict):
            return None, Transitions.none()
        try:
            rollback = governor.rollback()
        finally:  # the one too many prunes as well before it raises
            self.trained.rebase()
            gone = np.array([[slot.seed is None for slot in self._network.model.slots.values()]])
            changes = self._network.revoke(gone)
        return rollback, changes

    def expect_loss(self, *, forget: bool) -> None:
        """A seed was taken away on purpose: the model may do worse. ``forget`` how well it did, if that seed helped."""
        if self.governor is not None:
            self.governor.expect_change()
        if forget and self.watch is not None:
            self.watch.forget()
