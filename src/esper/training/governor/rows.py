"""The governor of a population: every network for itself, all in one look."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.transitions import Transitions
from esper.training.evaluation import Evaluation
from esper.training.governor.settings import GovernorSettings
from esper.training.governor.vitals import Monitor, Trouble, Vitals, skill
from esper.training.learning import TrainingReport
from esper.training.pending import Floats, Pending, at_once
from esper.training.population import Population
from esper.training.snapshots import Snapshots

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Intervention:
    """What a check led to."""

    trouble: NDArray[np.int8]
    """`Trouble` of each network, ``[E]``; NONE for most."""
    exhausted: Bools
    """``[E]``: those that had no rollback left; they are restored too, and should not go on."""
    transitions: Transitions
    """The seeds that were pruned."""

    @property
    def rows(self) -> Bools:
        """``[E]``: which networks were rolled back."""
        return self.trouble != Trouble.NONE


class Unwatched:
    """The governor of networks that nobody watches over."""

    def __init__(self, size: int) -> None:
        self.penalty = 0.0
        self.rollbacks: NDArray[np.int64] = np.zeros(size, np.int64)
        """``[E]``."""
        self._idle = Intervention(np.zeros(size, np.int8), np.zeros(size, np.bool_), Transitions.none())

    @property
    def rollbacks_used(self) -> NDArray[np.float64]:
        """``[E]``: the share of the allowed rollbacks that an episode has had, in [0, 1]."""
        return np.zeros(len(self.rollbacks))

    def restart(self, rows: Bools) -> None:
        """Other networks have come into ``rows``, bool ``[E]``."""

    def expect_change(self, rows: Bools) -> None:
        """What was usual for the networks ``rows``, bool ``[E]``, need not be any more: their data or seeds changed."""

    def finite(self) -> Pending[Bools]:
        """``[E]``: whether all parameters and moments of a network are finite now, as far as anybody looks."""
        return at_once(np.ones(len(self.rollbacks), np.bool_))

    def check(self, training: TrainingReport, evaluation: Evaluation, finite: Bools, running: Bools) -> Intervention:
        """Look at the networks ``running``, bool ``[E]``, and restore those in trouble; ``finite`` as found above."""
        return self._idle


class RowGovernor(Unwatched):
    """Keeps a snapshot of every network of a population, and restores those in trouble from it."""

    def __init__(self, population: Population, settings: GovernorSettings, classes: int) -> None:
        super().__init__(population.size)
        self.penalty = settings.penalty
        self._most = settings.max_rollbacks
        self._population = population
        self._classes = classes
        self._monitor = Monitor(settings, population.size)
        self._snapshots = Snapshots.of(population.state.holdings, population.germinations, population.table.owning)

    @property
    def rollbacks_used(self) -> NDArray[np.float64]:
        return np.minimum(self.rollbacks / max(self._most, 1), 1.0)

    def restart(self, rows: Bools) -> None:
        self.rollbacks = np.where(rows, 0, self.rollbacks)
        self._monitor.restart(rows)
        self._keep(rows)

    def expect_change(self, rows: Bools) -> None:
        self._monitor.restart(rows)

    def finite(self) -> Pending[Bools]:
        pool = self._population.pool
        broken = ~pool.values.isfinite()
        for moment in pool.moments.values():
            broken |= ~moment.isfinite()
        owners = pool.owners.to(broken.device, non_blocking=True)[pool.row_of_value]
        counts = pool.steps.new_zeros(self._population.size).index_add_(0, owners, broken.to(pool.steps))
        return Pending((counts,), _all_finite)

    def check(self, training: TrainingReport, evaluation: Evaluation, finite: Bools, running: Bools) -> Intervention:
        judgement = self._monitor.judge(self._vitals(training, evaluation, finite))
        self._keep(judgement.good & running)
        trouble = np.where(running, judgement.trouble, np.int8(Trouble.NONE))
        rows = trouble != Trouble.NONE
        if not rows.any():
            return self._idle
        transitions = self._population.roll_back(rows.nonzero()[0], self._snapshots)
        self.rollbacks = self.rollbacks + rows
        return Intervention(trouble, rows & (self.rollbacks > self._most), transitions)

    def _vitals(self, training: TrainingReport, evaluation: Evaluation, finite: Bools) -> Vitals:
        gradients = np.isfinite(training.host_gradient) & np.isfinite(training.seed_gradient).all(axis=1)
        losses = np.isfinite(training.loss) & np.isfinite(evaluation.loss)
        return Vitals(training.loss, skill(evaluation.accuracy, self._classes), losses & gradients & finite)

    def _keep(self, rows: Bools) -> None:
        population = self._population
        self._snapshots = self._snapshots.renewed(
            rows, population.state.holdings, population.germinations, population.table.owning
        )


def _all_finite(broken_values: Floats) -> Bools:
    return broken_values == 0


def watching(population: Population, settings: GovernorSettings | None, classes: int) -> Unwatched:
    """The governor of a population that these settings ask for."""
    return Unwatched(population.size) if settings is None else RowGovernor(population, settings, classes)
