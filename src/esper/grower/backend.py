"""One growing model as the growth engine sees it, with E = 1: its lifecycle, and how it is measured and restored."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from esper.engine.budget import Budget, Charge, Cost, Costs, RentBasis, affordable_blueprints, budget_left
from esper.engine.measurements import Evaluation, TrainingReport
from esper.errors import CheckpointError, ConfigError
from esper.grower.config import GrowerConfig
from esper.grower.distributed import Processes
from esper.grower.evaluation import Criterion, ModelEvaluation, find_changes, measure_model
from esper.grower.governor import LearningCheck, ModelSnapshot, OptimizerCheck
from esper.grower.gradients import GradientRecorder
from esper.grower.promise_recorder import PromiseRecorder
from esper.grower.refit import ForkTrainer, SeedlessFork
from esper.grower.scores import LOSS, ConstraintSet, Metrics, Scores, name_loss
from esper.grower.validation import ExampleMean, Validation, compute_difference_error
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.model import GrowingModel
from esper.growth.promise import Promises, PromiseSettings
from esper.growth.site import Layout
from esper.growth.slot import count_blend_parameters
from esper.lifecycle.actions import Blend, Curve, Head
from esper.lifecycle.rules import ActionMasks, Rules, legal_actions
from esper.lifecycle.table import NO_BLUEPRINT, SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import (
    Step,
    Transitions,
    add_fossils,
    clear_changed_measurements,
    remove_seeds,
    step,
)
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.devices import Deferred
from esper.numerics.random_streams import module_generator
from esper.serialization import from_plain, to_plain

RECENT = 6
"""Newest contributions of a module from which their error is estimated, where examples do not show it."""
LEAST_RECENT = 3
"""Fewest of them."""
FOSSIL_INTERVAL = 4
"""Decisions from one measurement of a module that is kept for good to the next: what it contributes decides nothing."""
BYTES_PER_VALUE = 4
COPIES = 4
"""Values in memory per parameter: itself, its gradient and two moments, as with AdamW."""
_CALLER = 6
"""Calls between a warning on repetition and the loop that called `esper.Grower.step`."""
_OF_MODULES = ("accuracy_contribution", "loss_contribution", "accuracy_error", "loss_error")
"""What an evaluation has of each slot."""


class ModelSpec:
    """Blueprints, their costs and compatibility, for the slots of one model."""

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer) -> None:
        self._slots = model.slots.values()
        self._optimizer = optimizer
        names = dict.fromkeys(name for slot in self._slots for name in slot.blueprints)
        self.kinds: Sequence[type[Blueprint]] = [get(name) for name in names]
        """Every blueprint that some slot offers, in the order of the slots."""
        blends = [[count_blend_parameters(blend, slot.site) for blend in Blend] for slot in self._slots]
        costs: Ints = np.array(
            [
                [kind.cost_at(slot.site) if kind.name in slot.blueprints else (0, 0) for kind in self.kinds]
                for slot in self._slots
            ]
        )
        parameters, flops = Cost(costs[None, ..., 0], np.array([blends])), Cost.of_blueprints(costs[None, ..., 1])
        self.costs = Costs(parameters, flops, parameters.scale(BYTES_PER_VALUE * COPIES))
        """Costs of modules; 0 for blueprints that a slot does not offer."""
        self.widths: Ints = np.array([[slot.site.width for slot in self._slots]])
        """Channels at each slot."""
        self._offered = np.array([[kind.name in slot.blueprints for kind in self.kinds] for slot in self._slots])

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint may germinate in a slot."""
        enabled = np.array([slot.enabled for slot in self._slots])
        return (self._offered & enabled[:, None])[None]

    @property
    def learning_rates(self) -> Floats:
        """The host's learning rate, as it is now."""
        return np.array([float(self._optimizer.param_groups[0]["lr"])])


class GrowingNetwork:
    """A growing model with its lifecycle table: the networks of a `GrowthBackend`, with E = 1."""

    def __init__(
        self,
        model: GrowingModel,
        spec: ModelSpec,
        budget: Budget,
        rent_on: RentBasis,
        rules: Rules,
        random_seed: int,
    ) -> None:
        self.model, self.rules = model, rules
        self.specs = spec
        self.blueprints = [kind.name for kind in spec.kinds]
        self.budget = budget
        self.host_parameters: Ints = np.array([model.host_parameters])
        if rent_on == "parameters":
            self.charge = Charge(spec.costs.parameters, self.host_parameters)
        elif model.host_flops is None:
            raise ConfigError(f"rent_on is 'flops', but torch cannot count {model.uncounted_flops}: say 'parameters'")
        else:
            self.charge = Charge(spec.costs.flops, np.array([model.host_flops]))
        """What rent is paid on, and the costs that controllers see."""
        # Empty slots, and fossils where the model has some already.
        shape = (1, len(model.slots))
        blueprints, blends = np.full(shape, NO_BLUEPRINT, np.int64), np.zeros(shape, np.int64)
        for place, slot in enumerate(model.slots.values()):
            if slot.seed is not None and slot.seed.fossilized:
                blueprints[0, place] = self.blueprints.index(slot.seed.blueprint.name)
                blends[0, place] = slot.seed.blend
        everything = np.ones(spec.compatible.shape, np.bool_)
        self.table = add_fossils(SeedTable.dormant(*shape), blueprints, blends, everything)[0]
        self.measurements = SeedMeasurements.none(1, len(model.slots))
        self.germinations: Ints = np.zeros(len(model.slots), np.int64)
        """Modules that each slot has had, ``[S]``."""
        self.recent: Floats = np.full((2, RECENT, len(model.slots)), np.nan)
        """The newest contributions of each module in its present stage, by score and by loss, ``[2, RECENT, S]``."""
        self._random_seed = random_seed
        self._layouts = [slot.site.layout for slot in model.slots.values()]

    def affordable(self, table: SeedTable | None = None) -> Bools:
        """Which blueprints the budget allows, ``[1, S, K]``, beside the modules in ``table``; None: those here."""
        return affordable_blueprints(
            self.budget, self.specs.costs, self.table if table is None else table, self.rules.blends
        )

    @property
    def budget_left(self) -> Floats:
        """The fraction of the scarcest cap that is not spent yet, ``[1]``."""
        return budget_left(self.budget, self.specs.costs, self.table)

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout, ``[1, S]``."""
        return np.array([[slot_layout is layout for slot_layout in self._layouts]])

    def require_same_slots(self) -> None:
        """Refuse a model in which something else than its grower has planted or pruned."""
        for owns, slot in zip(self.table.owning[0].tolist(), self.model.slots.values(), strict=True):
            if owns != (slot.seed is not None):
                raise ConfigError(
                    f"slot {slot.name!r} {'lost its seed' if owns else 'has a seed'} that the grower did not "
                    f"{'prune' if owns else 'plant'}: let only the grower plant and prune, or load its state to resume"
                )

    def legal_actions(self) -> ActionMasks:
        """The actions that rules, measurements and budget allow now."""
        return legal_actions(self.table, self.measurements, self.rules, self.specs.compatible, self.affordable())

    def decide(self, actions: Ints) -> Step:
        """Carry out one action ``[1, 8]``, and advance all other slots by a step; all of it or nothing."""
        result = step(self.table, self.measurements, actions, self.rules, self.specs.compatible, self.affordable())
        blueprint, blend = int(actions[0, Head.BLUEPRINT]), Blend(int(actions[0, Head.BLEND]))
        self.change_slots(result.table, result.transitions, blueprint, blend)
        return result

    def change_slots(
        self, table: SeedTable, changes: Transitions, blueprint: int = NO_BLUEPRINT, blend: Blend = Blend.ADD
    ) -> None:
        """Plant, prune and fossilize modules as ``changes`` require, which lead to ``table``."""
        # Germination comes first: making a module may fail, and then nothing has changed.
        slots = self.model.slots.values()
        for place in changes.slot[changes.after == Stage.GERMINATED].tolist():
            generator = module_generator(self._random_seed, place, int(self.germinations[place]))
            slots[place].plant(slots[place].make_seed(self.blueprints[blueprint], generator, blend))
            self.germinations[place] += 1
        for place in changes.slot[changes.after == Stage.PRUNED].tolist():
            slots[place].prune()
        for place in changes.slot[changes.after == Stage.FOSSILIZED].tolist():
            slots[place].fossilize()
        self.measurements = clear_changed_measurements(self.measurements, changes)
        self.recent[:, :, changes.slot] = np.nan
        self.table = table
        self.update_seeds()

    def revoke(self, empty: Bools) -> Transitions:
        """Update the table after a rollback has removed the modules in the slots ``empty``, bool ``[1, S]``."""
        self.table, changes = remove_seeds(self.table, empty)
        self.measurements = clear_changed_measurements(self.measurements, changes)
        self.recent[:, :, changes.slot] = np.nan
        return changes

    def record_contributions(self, by_score: Floats, by_loss: Floats) -> None:
        """Add the contributions ``[1, S]`` of a decision, where they were measured, to the `recent` ones."""
        new, measured = np.stack([by_score, by_loss]), np.isfinite(by_score[0])
        self.recent[:, :, measured] = np.concatenate([self.recent[:, 1:], new], axis=1)[:, :, measured]

    def estimate_errors(self) -> tuple[Floats, Ints]:
        """Errors of contributions by score and by loss, ``[2, S]``, and of how many decisions, ``[S]``; NaN of too few.

        The variance is half the mean square of successive differences, so that a trend hardly counts (von Neumann et
        al. 1941, *The mean square successive difference*).
        """
        decisions: Ints = np.isfinite(self.recent[0]).sum(axis=0)
        squares: Floats = np.nansum(np.diff(self.recent, axis=1) ** 2, axis=1)
        errors: Floats = np.sqrt(squares / (2 * np.maximum(decisions - 1, 1)))
        return np.where(decisions >= LEAST_RECENT, errors, np.nan), decisions

    def update_seeds(self) -> None:
        """Set the alpha of every module by the table; a module learns from its second decision on."""
        for place, slot in enumerate(self.model.slots.values()):
            seed = slot.seed
            if seed is None or seed.fossilized:
                continue
            seed.alpha.fill_(float(self.table.alpha[0, place]))
            seed.requires_grad_(bool(self.table.stage[0, place] != Stage.GERMINATED))
            self.model.copies.sync_slot(slot)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return to_plain(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        values = from_plain(self._state(), state, "the network")
        table: SeedTable = values["table"]
        kinds = {"stage": len(Stage), "blend": len(Blend), "alpha_curve": len(Curve), "blueprint": len(self.blueprints)}
        for name, numbers in cast("dict[str, Floats]", vars(table)).items():
            low = NO_BLUEPRINT if name == "blueprint" else 0
            # Others are weights, ages and numbers of steps.
            high = kinds[name] - 1 if name in kinds else 1 if numbers.dtype == np.float32 else 2**15 - 1
            if not np.all((numbers >= low) & (numbers <= high)):
                raise CheckpointError(
                    f"the grower's state is damaged: {name} is {numbers.tolist()[0]} in its table, where "
                    f"numbers are from {low} to {high}; use an earlier one"
                )
        self.table, self.measurements = values["table"], values["measurements"]
        self.germinations, self.recent = values["germinations"], values["recent"]

    def _state(self) -> dict[str, Any]:
        names = "table", "measurements", "germinations", "recent"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ModelTraining(TrainingReport):
    """The training of one model since the last decision."""

    metrics: Metrics | None = None
    """Metrics of the model as it is, if the user has measured them already."""


class ModelBackend:
    """A model that a user's optimizer trains: an `esper.engine.GrowthBackend`."""

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
        evaluate, scaler, growth = criterion.evaluate, config.scaler, config.growth
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
        self.learning = LearningCheck(growth.governor, self.scores)
        self.optimizer_check = OptimizerCheck(model.host)
        self.gradients = GradientRecorder(model, optimizer, scaler, growth.gradient_health)
        self.forks = ForkTrainer(
            model, optimizer, config.loss if criterion.refit else None, scaler, processes.average_gradient
        )
        for slot in model.slots.values():
            slot.feature_hook = None  # of a former grower
        self.promise_recorder = None
        """Records what promises are measured by; None where they are not measured."""
        if promise is not None:
            self.promise_recorder = PromiseRecorder(
                model, network.specs.kinds, promise.examples, scaler, add_flops, active=processes.is_first
            )
        self.last_good = ModelSnapshot(model, optimizer)
        self._function, self._processes = evaluate, processes
        self._is_scaled = scaler is not None

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss and score of guessing, or of the first measurement where guessing is not known."""
        return self.scores.chance_loss, self.scores.chance_score

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[tuple[TrainingReport, Evaluation]]:
        """Measure the model at once; a model that is not finite is not evaluated."""
        report = training.fetch()
        assert isinstance(report, ModelTraining)
        train_loss = float(report.loss[0])
        # Modules that are kept for good and were measured a short time ago are left out.
        table, measurements = self.networks.table, self.networks.measurements
        known = np.isfinite(measurements.contribution) & (measurements.contribution_age < FOSSIL_INTERVAL - 1)
        due = due & ~((table.stage == Stage.FOSSILIZED) & known)

        # A diverged model cannot be measured: all its figures are unknown.
        one, unknown = np.full(1, np.nan), np.full(due.shape, np.nan)
        progress = self.scores.compute_progress(None)
        evaluation = ModelEvaluation(
            one, one, unknown, unknown, unknown, unknown, due, None if progress is None else np.array([progress])
        )
        skills, finite, diverged = (math.nan, math.nan), False, False
        if not check_finite or self.is_finite():
            evaluation = self.evaluate(due, train_loss, report.metrics)
            self.scores.check_train_accuracy(float(report.accuracy[0]))
            finite = True
            figures = {"train_loss": train_loss, **self._select_decisive(evaluation.metrics)}
            if not self.learning.require_finite(figures):
                # What was known of modules before still holds.
                evaluation = replace(
                    evaluation, **dict.fromkeys(_OF_MODULES, unknown), fresh=np.zeros(due.shape, np.bool_)
                )
            elif math.isfinite(evaluation.accuracy[0]):
                metrics = evaluation.metrics
                diverged = self.learning.has_diverged(metrics, train_loss)
                # An output that is the same for all examples shows no skill, whatever its accuracy happens to be.
                constant = evaluation.constant_output
                skills = (0.0, 0.0) if constant else self.scores.compute_skills(metrics, train_loss)
        result = (
            TrainingReport(report.loss, report.accuracy, report.host_gradient, report.seed_gradient, report.health),
            replace(evaluation, skill=np.array([skills]), finite=np.array([finite]), diverged=np.array([diverged])),
        )
        return Deferred((), lambda: result)

    def is_finite(self) -> bool:
        """Whether all parameters, moments and unscaled gradients are finite."""
        # With scaled losses a step with infinite gradients was skipped, which is no trouble.
        return self._processes.run_on_first_process(lambda: self.last_good.is_finite(gradients=not self._is_scaled))

    def measure_dependence(self, slots: Bools) -> ModelEvaluation:
        """Measure the model, and the modules in ``slots``, bool ``[1, S]``, by switching them off now."""
        return self._compute_contributions(*self._measure(slots), slots)

    def measure_constraint_references(self) -> None:
        """Measure the losses that constraints are relative to: those of the model before growth."""
        if self.constraints.limits:
            metrics, _, _ = self._measure(np.zeros(self.networks.table.stage.shape, np.bool_))
            self.constraints.set_references(metrics)

    def evaluate(self, due: Bools, train_loss: float = math.nan, known: Metrics | None = None) -> ModelEvaluation:
        """Measure the model, unless its metrics are ``known``, and the modules in the slots ``due``, ``[1, S]``."""
        forks = self.forks.get_comparable()
        metrics, ablated, constant_output = self._measure(due, known, forks)
        # Where a constraint is broken, every module that may be pruned for it is measured.
        others = self._find_prunable() & ~due
        if self.constraints.find_broken(metrics) and others.any():
            ablated, due = {**ablated, **self._measure(others, metrics, forks)[1]}, due | others
        is_first = known is None and not self.scores.has_reference
        self.scores.set_reference(metrics, train_loss)
        if is_first and self.scores.has_reference:
            self._check_repetition(metrics)
        return self._compute_contributions(metrics, ablated, constant_output, due, is_decision=True)

    def _select_decisive(self, metrics: Metrics) -> Metrics:
        """The metrics that decide about growth: others, such as seconds, may differ between calls."""
        names = {LOSS, self.scores.metric, *map(name_loss, self.constraints.limits)}
        return {name: value for name, value in metrics.items() if name in names}

    def _check_repetition(self, metrics: Metrics) -> None:
        """Measure the model once more, and warn if another result comes of it, or if it was in training mode."""
        modes: list[bool] = []
        with self.networks.model.register_forward_pre_hook(lambda module, _: modes.append(module.training)):
            again, _, _ = self._measure(np.zeros(self.networks.table.stage.shape, np.bool_))
        if any(modes):
            warnings.warn(
                "evaluate turns on training mode, so dropout and batch norm act as in training: it is called in eval "
                "mode, so omit model.train() before the model is called",
                stacklevel=_CALLER,
            )
        changes = find_changes(self._select_decisive(metrics), again)
        self.scores.noise, self.scores.loss_noise = changes.get(self.scores.metric, 0.0), changes.get(LOSS, 0.0)
        if changes:
            name = max(changes, key=lambda name: changes[name])
            warnings.warn(
                f"evaluate gave {name} {metrics[name]:.6g} and then {again[name]:.6g} for the same model, or other "
                "examples: use the same examples in the same order at every call, without random augmentation. The "
                "difference counts as an error of contributions",
                stacklevel=_CALLER,
            )

    def _measure(
        self,
        due: Bools,
        known: Metrics | None = None,
        forks: Mapping[str, SeedlessFork | None] = MappingProxyType({}),
    ) -> tuple[Metrics, dict[str, Metrics], bool]:
        network, parse, function = self.networks, self.constraints.parse_metrics, self._function
        return self._processes.run_on_first_process(
            lambda: measure_model(network.model, network.table, function, parse, known, due, forks)
        )

    def _compute_contributions(
        self,
        metrics: Metrics,
        ablated: dict[str, Metrics],
        constant_output: bool,
        due: Bools,
        *,
        is_decision: bool = False,
    ) -> ModelEvaluation:
        """The evaluation ``[1]`` of what was measured, with contributions ``[1, S]`` by score and by loss.

        Those of a decision are kept, to estimate errors of plain numbers.
        """
        scores, blended = self.scores, self.networks.table.blended
        by_score, by_loss, score_error, loss_error = np.full((4, *due.shape), np.nan)
        scores.record_values([metrics, *ablated.values()])
        for place, slot in enumerate(self.networks.model.slots):
            if slot in ablated:
                variant, counts = ablated[slot], bool(blended[0, place])
                contribution = scores.compute_contribution(metrics, variant, counts=counts)
                by_score[0, place], score_error[0, place] = contribution
                # A module that does not count yet was switched on, not off.
                by_loss[0, place] = (1.0 if counts else -1.0) * (variant[LOSS] - metrics[LOSS])
                loss_error[0, place] = compute_difference_error(metrics[LOSS], variant[LOSS], noise=scores.loss_noise)
        # Of plain numbers errors are known only from how they vary between decisions.
        network = self.networks
        if is_decision:
            network.record_contributions(by_score, by_loss)
        (score_noise, loss_noise), decisions = network.estimate_errors()
        is_plain = not isinstance(metrics[LOSS], ExampleMean)
        if is_plain:
            at_least: Floats = np.fmax(loss_error, loss_noise)
            loss_error = np.where(np.isfinite(by_loss), at_least, loss_error)
        if not isinstance(scores.get_value(metrics), ExampleMean):
            at_least = np.fmax(score_error, score_noise)
            score_error = np.where(np.isfinite(by_score), at_least, score_error)
        progress = scores.compute_progress(metrics)
        return ModelEvaluation(
            loss=np.array([float(metrics[LOSS])]),
            accuracy=np.array([scores.compute_score(metrics)]),
            accuracy_contribution=by_score,
            loss_contribution=by_loss,
            accuracy_error=score_error,
            loss_error=loss_error,
            fresh=due,
            progress=None if progress is None else np.array([progress]),
            metrics=metrics,
            ablated=ablated,
            constant_output=constant_output,
            estimated_from=np.where(np.isfinite(loss_noise) & is_plain, decisions, 0),
        )

    def find_constraint_breaker(self, evaluation: ModelEvaluation) -> Bools:
        """The module without which constraints are broken by least, bool ``[1, S]``; none if no removal helps."""
        prunable, excess = self._find_prunable(), self.constraints.compute_excess
        left = np.full(prunable.shape, excess(evaluation.metrics))
        before = left.max()
        for place, name in enumerate(self.networks.model.slots):
            if name in evaluation.ablated and prunable[0, place]:
                left[0, place] = excess(evaluation.ablated[name])
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
