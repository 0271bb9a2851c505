"""One model as the growth engine sees it: networks with E = 1 that can be measured, snapshotted and restored.

All processes of a growth are synchronised here: what the first one measures holds in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from esper.engine.measurements import Evaluation, Measurement, TrainingReport
from esper.engine.promises import Promises
from esper.grower.distributed import Processes
from esper.grower.evaluation import (
    DependenceMeasurement,
    Evaluate,
    ModelMeasurement,
    compute_contributions,
    measure_model,
)
from esper.grower.governor import ModelSnapshot
from esper.grower.gradients import GradientRecorder
from esper.grower.learning_check import LearningCheck, OptimizerCheck
from esper.grower.network import GrowingNetwork
from esper.grower.promise_recorder import PromiseRecorder
from esper.grower.refit import ForkTrainer, SeedlessFork
from esper.grower.scores import LOSS, ConstraintSet, Metrics, Scores
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions
from esper.numerics.arrays import Bools
from esper.numerics.deferred import Deferred

FOSSIL_INTERVAL = 4
"""Decisions from one measurement of a module that is kept for good to the next: what it contributes decides nothing."""


class ModelBackend:
    """A model that a user's optimizer trains: an `esper.engine.GrowthBackend`.

    With ``scaled`` losses a step with infinite gradients was skipped, which is no trouble.
    """

    size = 1
    skills = 2
    """By accuracy and by losses: a network that guesses by either, and did better before, has collapsed."""

    def __init__(
        self,
        network: GrowingNetwork,
        evaluate: Evaluate,
        *,
        scores: Scores,
        constraints: ConstraintSet,
        forks: ForkTrainer,
        gradients: GradientRecorder,
        promises: PromiseRecorder | None,
        snapshot: ModelSnapshot,
        learning: LearningCheck,
        trained: OptimizerCheck,
        processes: Processes,
        scaled: bool,
    ) -> None:
        self.networks = network
        self.measurement: ModelMeasurement | None = None
        """The newest; None before any."""
        self.metrics_before: Metrics | None = None
        """Metrics of the model after training, before any rollback; None where it could not be measured."""
        self.supplied: Metrics | None = None
        """Metrics of the model as it is, if the user has measured them already."""
        self._evaluate, self._scores, self._constraints, self._forks = evaluate, scores, constraints, forks
        self._gradients, self._promises, self._snapshot = gradients, promises, snapshot
        self._learning, self._trained, self._processes, self._scaled = learning, trained, processes, scaled
        self._train_loss = math.nan

    @property
    def metrics(self) -> Metrics:
        """The newest metrics of the model as it is."""
        return self.require_measurement().baseline

    def require_measurement(self) -> ModelMeasurement:
        """The newest measurement, of which there must be one."""
        assert self.measurement is not None, "the engine measures before it decides"
        return self.measurement

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss and score of guessing, or of the first measurement where guessing is not known."""
        return self._scores.chance_loss, self._scores.chance_score

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[Measurement]:
        """Measure the model at once; a model that is not finite is not evaluated."""
        report = self._processes.broadcast(training.fetch)
        self.metrics_before, self._train_loss = None, float(report.loss[0])
        # Modules that are kept for good and were measured a short time ago are left out.
        table, evidence = self.networks.table, self.networks.evidence
        known = np.isfinite(evidence.contribution) & (evidence.contribution_age < FOSSIL_INTERVAL - 1)
        due = due & ~((table.stage == Stage.FOSSILIZED) & known)

        # A diverged model cannot be measured: all its figures are unknown.
        unknown = np.full(due.shape, np.nan)
        evaluation = self._add_progress(
            Evaluation(np.full(1, np.nan), np.full(1, np.nan), unknown, unknown, unknown, unknown, due), metrics=None
        )
        skills, finite, diverged = (math.nan, math.nan), False, False
        if not check_finite or (math.isfinite(self._train_loss) and self.is_finite()):
            evaluation = self._measure(due, self.supplied)
            self._scores.check_train_accuracy(float(report.accuracy[0]))
            self.metrics_before, loss = self.metrics, self.metrics[LOSS]
            finite = math.isfinite(loss) and math.isfinite(evaluation.accuracy[0]) and math.isfinite(self._train_loss)
            if math.isfinite(loss) and math.isfinite(evaluation.accuracy[0]):
                diverged = self._learning.has_diverged(self.metrics, self._train_loss)
                # An output that is the same for all examples shows no skill, whatever its accuracy happens to be.
                constant = self.require_measurement().constant_output
                skills = (0.0, 0.0) if constant else self._scores.compute_skills(self.metrics, self._train_loss)
        measurement = Measurement(report, evaluation, np.array([skills]), np.array([finite]), np.array([diverged]))
        return Deferred((), lambda: measurement)

    def evaluate(self, due: Bools) -> Evaluation:
        """Measure the model as it is now, and the modules in the slots ``due``, bool ``[1, S]``."""
        return self._measure(due, None)

    def is_finite(self) -> bool:
        """Whether all parameters, gradients and moments are finite."""
        return self._processes.broadcast(lambda: self._snapshot.is_finite(gradients=not self._scaled))

    def measure_dependence(self, slots: Bools) -> DependenceMeasurement:
        """The model and the modules in ``slots``, bool ``[1, S]``, measured by switching them off now."""
        measurement = self._run(slots, None)
        evaluation = compute_contributions(measurement, self.networks.model, self.networks.table, self._scores)
        broken = bool(self._constraints.find_broken(measurement.baseline))
        return DependenceMeasurement(evaluation, broken, measurement.constant_output)

    def measure_constraint_references(self) -> None:
        """Measure the losses that constraints are relative to: those of the model before growth."""
        if self._constraints.limits:
            self._constraints.set_references(self._run(np.zeros_like(self._suspects), None).baseline)

    def _measure(self, due: Bools, baseline: Metrics | None) -> Evaluation:
        """Measure the model, of which ``baseline`` is known perhaps, and the modules in the slots ``due``."""
        network = self.networks
        forks = self._forks.get_comparable()
        measurement = self._run(due, baseline, forks)
        # Where a constraint is broken, every module that may be pruned for it is measured.
        others = self._suspects & ~due
        if self._constraints.find_broken(measurement.baseline) and others.any():
            more = self._run(others, measurement.baseline, forks)
            measurement = measurement._replace(ablated={**measurement.ablated, **more.ablated}, due=due | others)
        self.measurement = measurement
        self._scores.set_reference(measurement.baseline, self._train_loss)
        evaluation = compute_contributions(measurement, network.model, network.table, self._scores)
        return self._add_progress(evaluation, measurement.baseline)

    def _add_progress(self, evaluation: Evaluation, metrics: Metrics | None) -> Evaluation:
        progress = self._scores.compute_progress(metrics)
        return evaluation if progress is None else replace(evaluation, progress=np.array([progress]))

    def _run(
        self,
        due: Bools,
        baseline: Metrics | None,
        forks: Mapping[str, SeedlessFork | None] = MappingProxyType({}),
    ) -> ModelMeasurement:
        network, parse = self.networks, self._constraints.parse_metrics
        return self._processes.broadcast(
            lambda: measure_model(network.model, network.table, self._evaluate, parse, baseline, due, forks)
        )

    def find_culprit(self) -> Bools:
        """The module without which constraints are broken by least, bool ``[1, S]``; none if none is broken or none of
        those that were measured helps.
        """
        measurement, suspects, excess = self.require_measurement(), self._suspects, self._constraints.compute_excess
        left = np.full(suspects.shape, excess(measurement.baseline))
        before = left.max()
        for place, name in enumerate(self.networks.model.slots):
            if name in measurement.ablated and suspects[0, place]:
                left[0, place] = excess(measurement.ablated[name])
        return (left == left.min()) & (left < before)

    @property
    def _suspects(self) -> Bools:
        """Slots with blended modules that can still be pruned, bool ``[1, S]``."""
        return self.networks.table.live & self.networks.table.blended

    def measure_promises(self, due: Bools) -> Promises:
        """Measure what blueprints promise in the slots ``due``, bool ``[1, S]``, from the recorded minibatches."""
        recorder = self._promises
        assert recorder is not None, "promises are measured only where a recorder was made for them"
        unknown = np.full(self.networks.specs.compatible.shape, np.nan)
        missing = Promises(unknown, unknown, np.ones(1, np.bool_))
        return self._processes.broadcast(lambda: recorder.measure(due) if self._gradients.stepped else missing)

    def snapshot(self, rows: Bools) -> None:
        """Keep the present state of the model as the one to return to."""
        self._snapshot.take()

    def restore(self, rows: Bools) -> Transitions:
        """Return the model to its snapshot; gives the modules that were pruned."""
        self._snapshot.restore()
        self._trained.accept_changes()
        self.supplied = None
        if self._promises is not None:
            self._promises.clear()  # recorded of a model that is no more
        empty = np.array([[slot.seed is None for slot in self.networks.model.slots.values()]])
        return self.networks.revoke(empty)
