"""One model as the growth engine sees it: networks with E = 1 that can be measured, snapshotted and restored.

All that is known of the model is kept here. What the first of several processes measures holds in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from esper.engine.measurements import Evaluation, Measurement, TrainingReport
from esper.grower.config import GrowerConfig
from esper.grower.distributed import Processes
from esper.grower.evaluation import Criterion, ModelMeasurement, compute_contributions, measure_model
from esper.grower.governor import LearningCheck, ModelSnapshot, OptimizerCheck
from esper.grower.gradients import GradientRecorder
from esper.grower.network import GrowingNetwork
from esper.grower.promise_recorder import PromiseRecorder
from esper.grower.refit import ForkTrainer, SeedlessFork
from esper.grower.scores import LOSS, ConstraintSet, Metrics, Scores
from esper.grower.validation import Validation
from esper.growth.model import GrowingModel
from esper.growth.promise import Promises, PromiseSettings
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions
from esper.numerics.arrays import Bools
from esper.numerics.deferred import Deferred

FOSSIL_INTERVAL = 4
"""Decisions from one measurement of a module that is kept for good to the next: what it contributes decides nothing."""


@dataclass(frozen=True)
class ModelTraining(TrainingReport):
    """The training of one model since the last decision."""

    metrics: Metrics | None = None
    """Metrics of the model as it is, if the user has measured them already."""


@dataclass(frozen=True)
class ModelEvaluation(Evaluation):
    """One model on validation data."""

    measurement: ModelMeasurement | None = None
    """All metrics; None for a model that has diverged, which cannot be measured."""


class ModelBackend:
    """A model that a user's optimizer trains: an `esper.engine.GrowthBackend`.

    It registers hooks on optimizer and parameters. ``add_flops`` counts the FLOPs that promises take.
    """

    size = 1
    skills = 2
    """By accuracy and by losses: a network that guesses by either, and did better before, has collapsed."""

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        network: GrowingNetwork,
        criterion: Criterion,
        config: GrowerConfig,
        promise: PromiseSettings | None,
        processes: Processes,
        add_flops: Callable[[float], None],
    ) -> None:
        evaluate, scaler, conduct = criterion.evaluate, config.scaler, config.conduct
        outputs = evaluate.count_classes(model.output_shape) if isinstance(evaluate, Validation) else None
        self.networks = network
        self.constraints = ConstraintSet(criterion.objective, criterion.constraints)
        self.scores = Scores(
            criterion.metric,
            criterion.higher_is_better,
            config.classes,
            outputs or model.outputs,
            trained=bool(model.frozen.names),
            penalty=self.constraints.compute_penalty,
        )
        self.learning = LearningCheck(conduct.governor, self.scores)
        self.optimizer_check = OptimizerCheck(model.host, optimizer)
        self.gradients = GradientRecorder(model, optimizer, scaler, conduct.gradient_health)
        self.forks = ForkTrainer(model, optimizer, criterion.evidence, config.loss, scaler, processes.average_gradient)
        for slot in model.slots.values():
            slot.feature_hook = None  # of a former grower
        self.promise_recorder = None
        """Records what promises are measured by; None where they are not measured."""
        if promise is not None:
            self.promise_recorder = PromiseRecorder(
                model, network.specs.kinds, promise.examples, scaler, add_flops, active=processes.is_first
            )
        self.last_good = ModelSnapshot(model, optimizer)
        self._evaluate, self._processes = evaluate, processes
        self._is_scaled = scaler is not None

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss and score of guessing, or of the first measurement where guessing is not known."""
        return self.scores.chance_loss, self.scores.chance_score

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[Measurement]:
        """Measure the model at once; a model that is not finite is not evaluated."""
        report = training.fetch()
        assert isinstance(report, ModelTraining)
        train_loss = float(report.loss[0])
        # Modules that are kept for good and were measured a short time ago are left out.
        table, evidence = self.networks.table, self.networks.evidence
        known = np.isfinite(evidence.contribution) & (evidence.contribution_age < FOSSIL_INTERVAL - 1)
        due = due & ~((table.stage == Stage.FOSSILIZED) & known)

        # A diverged model cannot be measured: all its figures are unknown.
        one, unknown = np.full(1, np.nan), np.full(due.shape, np.nan)
        progress = self.scores.compute_progress(None)
        evaluation = ModelEvaluation(
            one, one, unknown, unknown, unknown, unknown, due, None if progress is None else np.array([progress])
        )
        skills, finite, diverged = (math.nan, math.nan), False, False
        if not check_finite or (math.isfinite(train_loss) and self.is_finite()):
            evaluation, metrics = self._measure(due, train_loss, report.metrics)
            self.scores.check_train_accuracy(float(report.accuracy[0]))
            measured = math.isfinite(metrics[LOSS]) and math.isfinite(evaluation.accuracy[0])
            finite = measured and math.isfinite(train_loss)
            if measured:
                diverged = self.learning.has_diverged(metrics, train_loss)
                # An output that is the same for all examples shows no skill, whatever its accuracy happens to be.
                constant = evaluation.measurement is not None and evaluation.measurement.constant_output
                skills = (0.0, 0.0) if constant else self.scores.compute_skills(metrics, train_loss)
        plain = TrainingReport(report.loss, report.accuracy, report.host_gradient, report.seed_gradient, report.health)
        result = Measurement(plain, evaluation, np.array([skills]), np.array([finite]), np.array([diverged]))
        return Deferred((), lambda: result)

    def evaluate(self, due: Bools) -> ModelEvaluation:
        """Measure the model as it is now, and the modules in the slots ``due``, bool ``[1, S]``."""
        return self._measure(due, math.nan, None)[0]

    def is_finite(self) -> bool:
        """Whether all parameters, gradients and moments are finite.

        With scaled losses a step with infinite gradients was skipped, which is no trouble.
        """
        return self._processes.run_on_first_process(lambda: self.last_good.is_finite(gradients=not self._is_scaled))

    def measure_dependence(self, slots: Bools) -> tuple[ModelEvaluation, ModelMeasurement]:
        """Measure the model, and the modules in ``slots``, bool ``[1, S]``, by switching them off now."""
        measurement = self._run(slots, None)
        return self._compute_evaluation(measurement), measurement

    def measure_constraint_references(self) -> None:
        """Measure the losses that constraints are relative to: those of the model before growth."""
        if self.constraints.limits:
            nothing = np.zeros(self.networks.table.stage.shape, np.bool_)
            self.constraints.set_references(self._run(nothing, None).baseline)

    def _measure(self, due: Bools, train_loss: float, metrics: Metrics | None) -> tuple[ModelEvaluation, Metrics]:
        """Measure the model, whose ``metrics`` are known perhaps, and the modules in the slots ``due``."""
        forks = self.forks.get_comparable()
        measurement = self._run(due, metrics, forks)
        # Where a constraint is broken, every module that may be pruned for it is measured.
        others = self._find_prunable() & ~due
        if self.constraints.find_broken(measurement.baseline) and others.any():
            more = self._run(others, measurement.baseline, forks)
            measurement = measurement._replace(ablated={**measurement.ablated, **more.ablated}, due=due | others)
        self.scores.set_reference(measurement.baseline, train_loss)
        return self._compute_evaluation(measurement), measurement.baseline

    def _compute_evaluation(self, measurement: ModelMeasurement) -> ModelEvaluation:
        network = self.networks
        evaluation = compute_contributions(measurement, network.model, network.table, self.scores)
        progress = self.scores.compute_progress(measurement.baseline)
        fields: dict[str, Any] = {**vars(evaluation), "progress": None if progress is None else np.array([progress])}
        return ModelEvaluation(**fields, measurement=measurement)

    def _run(
        self,
        due: Bools,
        baseline: Metrics | None,
        forks: Mapping[str, SeedlessFork | None] = MappingProxyType({}),
    ) -> ModelMeasurement:
        network, parse = self.networks, self.constraints.parse_metrics
        return self._processes.run_on_first_process(
            lambda: measure_model(network.model, network.table, self._evaluate, parse, baseline, due, forks)
        )

    def find_constraint_breaker(self, measurement: ModelMeasurement) -> Bools:
        """The module without which constraints are broken by least, bool ``[1, S]``; none if none is broken or none of
        those that were measured helps.
        """
        prunable, excess = self._find_prunable(), self.constraints.compute_excess
        left = np.full(prunable.shape, excess(measurement.baseline))
        before = left.max()
        for place, name in enumerate(self.networks.model.slots):
            if name in measurement.ablated and prunable[0, place]:
                left[0, place] = excess(measurement.ablated[name])
        return (left == left.min()) & (left < before)

    def _find_prunable(self) -> Bools:
        """Slots with blended modules that can still be pruned, bool ``[1, S]``."""
        return self.networks.table.live & self.networks.table.blended

    def measure_promises(self, due: Bools) -> Promises:
        """Measure what blueprints promise in the slots ``due``, bool ``[1, S]``, from the recorded minibatches."""
        recorder = self.promise_recorder
        assert recorder is not None, "promises are measured only where a recorder was made for them"
        unknown = np.full(self.networks.specs.compatible.shape, np.nan)
        missing = Promises(unknown, unknown, np.ones(1, np.bool_))
        return self._processes.run_on_first_process(
            lambda: recorder.measure(due) if self.gradients.stepped else missing
        )

    def snapshot(self, rows: Bools) -> None:
        """Keep the present state of the model as the one to return to."""
        self.last_good.take()

    def restore(self, rows: Bools) -> Transitions:
        """Return the model to its snapshot; gives the modules that were pruned."""
        self.last_good.restore()
        self.optimizer_check.accept_changes()
        if self.promise_recorder is not None:
            self.promise_recorder.clear()  # recorded of a model that is no more
        empty = np.array([[slot.seed is None for slot in self.networks.model.slots.values()]])
        return self.networks.revoke(empty)
