"""A population as the growth engine sees it: networks that can be measured, snapshotted and restored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from esper.engine.governor import skill
from esper.engine.measurements import CommittedEvaluation, Evaluation, Measurement, TrainingReport
from esper.growth.promise import Promises
from esper.lifecycle.transitions import Transitions
from esper.numerics.arrays import Bools
from esper.numerics.deferred import Deferred
from esper.population.evaluation import evaluate_committed, start_evaluation
from esper.population.learning import Batch
from esper.population.population import Population
from esper.population.promise import PromiseMeter
from esper.population.snapshots import Snapshots, roll_back
from esper.tasks.suite import Suite

Scored = TypeVar("Scored", Evaluation, CommittedEvaluation)


class PopulationBackend:
    """The networks of a population and the data that they are measured on: an `esper.engine.GrowthBackend`.

    Args:
        population: The networks.
        suite: Defines the objective of growth, and the loss and score of guessing.
        validation: The data on which every network is measured, ``[E, N, ...]``; overwritten where data drift.
        newest_examples: Returns the training examples on which promises are measured, ``[E, n, ...]``.
    """

    skills = 1
    """Number of measures of skill: one, the accuracy."""

    def __init__(
        self, population: Population, suite: Suite, validation: Batch, newest_examples: Callable[[], Batch]
    ) -> None:
        self.networks = population
        self.validation = validation
        self._suite = suite
        self._newest_examples = newest_examples
        self._meter = PromiseMeter(population)
        self._snapshots: Snapshots | None = None

    @property
    def size(self) -> int:
        """The number of networks E."""
        return self.networks.size

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss in nats and score of guessing."""
        return self._suite.chance_loss, self._suite.chance_score

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[Measurement]:
        """Start to measure all networks; the CPU waits only once, for training, evaluation and check together."""
        evaluation = start_evaluation(self.networks, self.validation, due)
        finite = Deferred((), lambda: np.ones(self.size, np.bool_))
        if check_finite:
            # Parameters and moments: zero times a number is zero, unless the number is infinite or NaN.
            flat = self.networks.flat
            zeros = torch.stack([flat.values, *flat.moments.values()]).mul_(0).sum(0)
            finite = Deferred((flat.sum_by_network(zeros),), np.isfinite)
        measured = training.combine(evaluation).combine(finite)

        return Deferred(measured.tensors, lambda *arrays: self._make_measurement(*measured.convert(*arrays)))

    def _make_measurement(self, results: tuple[TrainingReport, Evaluation], finite: Bools) -> Measurement:
        training, evaluation = results
        gradients = np.isfinite(training.host_gradient) & np.isfinite(training.seed_gradient).all(axis=1)
        losses = np.isfinite(training.loss) & np.isfinite(evaluation.loss)
        # A network's skill is measured by its accuracy, whatever the objective.
        skills = skill(evaluation.accuracy, self._suite.classes)[:, None]
        if self._suite.objective == "loss":  # training has no score
            training = replace(training, accuracy=np.full(self.size, np.nan))
        return Measurement(training, self._score(evaluation), skills, losses & gradients & finite)

    def evaluate(self, due: Bools) -> Evaluation:
        """Measure all networks, and the modules in the slots ``due``, bool ``[E, S]``."""
        return self._score(start_evaluation(self.networks, self.validation, due).fetch())

    def evaluate_committed(self, data: Batch) -> CommittedEvaluation:
        """Measure the networks without their unfinished modules on ``data [E, N, ...]``."""
        return self._score(evaluate_committed(self.networks, data))

    def _score(self, evaluation: Scored) -> Scored:
        """The evaluation in terms of the objective: unchanged for accuracy, otherwise with scores from the losses."""
        by_loss = self._suite.objective == "loss"
        return evaluation.score_losses(self._suite.chance_loss) if by_loss else evaluation

    def measure_promises(self, due: Bools) -> Promises:
        """Measure the promises of blueprints in the slots ``due``, bool ``[E, S]``, on the newest training examples."""
        return self._meter.measure(self._newest_examples(), due)

    def snapshot(self, rows: Bools) -> None:
        """Save the current state of the networks ``rows``, bool ``[E]``, as their snapshot."""
        state = self.networks.state
        self._snapshots = (
            Snapshots.from_state(state) if self._snapshots is None else self._snapshots.retake(rows, state)
        )

    def restore(self, rows: Bools) -> Transitions:
        """Restore the snapshots of the networks ``rows``, bool ``[E]``; returns which seeds were pruned."""
        assert self._snapshots is not None, "the governor takes a first snapshot of all networks"
        return roll_back(self.networks, rows, self._snapshots)
