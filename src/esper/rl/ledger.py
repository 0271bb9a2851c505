"""What controllers may be paid for: the facts of each step of E episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.actions import Head, Op
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.rl.rewards import Facts, Moment, Worth, rent_due
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite
from esper.training.budget import Cost
from esper.training.evaluation import CommittedEvaluation, Evaluation
from esper.training.population import Population

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Ledger:
    """Keeps what every network was worth before the present step."""

    def __init__(self, suite: Suite, population: Population) -> None:
        self._suite = suite
        self._population = population
        self._before = Moment.start(*population.table.stage.shape)
        self._host_flops: Floats = np.ones(population.size)
        self._flops: dict[tuple[int, ...], int] = {}
        self._rent: Floats = np.zeros(population.size)

    def restart(self, rows: Bools, instances: Sequence[Instance]) -> None:
        """New episodes begin in ``rows``, bool ``[E]``; ``instances`` are those of all networks."""
        self._before = Moment.start(*self._before.stage.shape).where(rows, self._before)
        for row in rows.nonzero()[0].tolist():
            instance = instances[row]
            self._rent[row] = instance.rent
            # Hosts of equal widths cost the same, and counting takes milliseconds.
            if instance.widths not in self._flops:
                self._flops[instance.widths] = self._suite.flops(instance)
            self._host_flops[row] = self._flops[instance.widths]

    def record(
        self,
        actions: NDArray[np.int64],
        decided_on: SeedTable,
        evaluation: Evaluation,
        commitment: CommittedEvaluation | None,
        finished: Bools,
    ) -> Facts:
        """The facts of a step; the next one begins where it ended.

        ``actions [E, 8]`` were taken in the state ``decided_on``; ``commitment`` is needed where an episode has
        ``finished``, bool ``[E]``.
        """
        after = self._moment(evaluation, commitment, finished)
        op, row = actions[:, Head.OP], np.arange(len(actions))
        ages = decided_on.seed_age[row, actions[:, Head.SLOT]].astype(np.int64)
        facts = Facts(self._before, after, finished, op != Op.WAIT, np.where(op == Op.PRUNE, ages, -1))
        self._before = after
        return facts

    def _moment(self, evaluation: Evaluation, commitment: CommittedEvaluation | None, finished: Bools) -> Moment:
        table = self._population.table
        counted = np.where(finished[:, None], table.stage == Stage.FOSSILIZED, table.blended)
        chance = np.log(self._suite.classes)
        accuracy, loss = evaluation.accuracy, evaluation.loss
        if commitment is not None:
            accuracy, loss = (
                np.where(finished, commitment.accuracy, accuracy),
                np.where(finished, commitment.loss, loss),
            )
        return Moment(
            Worth(accuracy, np.where(counted, np.nan_to_num(evaluation.accuracy_contribution), 0.0)),
            Worth(1 - loss / chance, np.where(counted, np.nan_to_num(evaluation.loss_contribution) / chance, 0.0)),
            self._rent_on(self._population.specs.costs.parameters, counted, self._population.host_parameters),
            self._rent_on(self._population.specs.costs.flops, counted, self._host_flops),
            table.stage,
            np.where(table.blended, table.alpha, 0.0).astype(np.float64),
        )

    def _rent_on(self, cost: Cost, counted: Bools, host: NDArray[np.number]) -> Floats:
        added = (cost.resident(self._population.table) * counted).sum(axis=1)
        return rent_due(added.astype(float), host.astype(float), self._rent)
