"""Measure one model and what its seeds contribute, and make of it what controllers see and gates know.

Seeds are measured by switching each of them off, or against forks that do without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from esper.config.arguments import describe_value
from esper.engine.history import History
from esper.engine.measurements import TrainingReport
from esper.engine.observation import FeatureInputs, Observation, observe
from esper.errors import ConfigError
from esper.grower.config import GrowerConfig, StepInputs
from esper.grower.constraints import ConstraintSet, Score
from esper.grower.distributed import Processes
from esper.grower.gradients import GradientRecorder
from esper.grower.isolated import IsolatedTrainer, SeedlessFork
from esper.grower.network import GrowingNetwork
from esper.grower.promise_recorder import Listener
from esper.grower.scores import LOSS, Figures, Scores
from esper.grower.shared_forward import SharedForwardEvaluator
from esper.growth.look import Look
from esper.growth.model import GrowingModel
from esper.growth.sharding import reshard
from esper.growth.side_pass import keep_modes
from esper.growth.taps import IncomparableError, flatten
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from esper.population.evaluation import Evaluation, update_evidence

Number: TypeAlias = float | Tensor
"""A tensor holds a single one."""
Evaluate: TypeAlias = Callable[
    [GrowingModel], Number | tuple[Number, Number] | Mapping[str, Number] | Mapping[str, Score]
]
"""Measures a model on validation data: a loss, a pair of loss and accuracy, figures by name with ``loss`` among them,
or, for a grower that is told an objective, a `Score` for each of several sets by name. The data and the device are its
business; the same model must give the same figures. It may leave the model in `eval` mode."""


class Measurement(NamedTuple):
    """What was measured of a model."""

    usual: Figures
    """As it is."""
    others: dict[str, Figures]
    """By slot: with its seed switched off, or on where it does not count yet."""
    due: Bools
    """``[1, S]``: the slots that were to be measured."""
    blind: bool
    """Whether the model as it is gave the same answer to everything; False where nobody listened."""


@contextmanager
def examine(model: GrowingModel) -> Generator[None]:
    """Within the block the model is measured; afterwards it is as it was."""
    try:
        with keep_modes(model):
            yield
    finally:
        reshard(model)


def measure_model(
    passes: SharedForwardEvaluator,
    table: SeedTable,
    evaluate: Evaluate,
    read: Callable[[object], Figures],
    whole: Figures | None,
    due: Bools,
    forks: Mapping[str, SeedlessFork | None] = MappingProxyType({}),
) -> Measurement:
    """Measure the model as it is, and with each seed that is ``due``, bool ``[1, S]``, at another weight.

    A seed that counts is to be compared with its absence, in the model or in its fork, if ``forks`` names it; where
    that is None it is left out. One that does not count yet is put in at full weight, to be compared with the model as
    it is. ``whole`` is the former figure, if it is known; ``read`` checks what ``evaluate`` returns.

    Raises:
        ConfigError: ``evaluate`` returns what is none of its figures.
    """
    model, answers = passes.model, Answers()
    changes = {
        slot.name: 0.0 if table.blended[0, place] else 1.0
        for place, slot in enumerate(model.slots.values())
        if slot.seed is not None and due[0, place]
    }
    measure = answers.first_of(evaluate) if whole is None else evaluate

    def compute_figures(model: GrowingModel) -> Figures:
        return read(measure(model))

    with examine(model):
        alone = {name: weight for name, weight in changes.items() if name not in forks}
        usual, others = passes.measure(compute_figures, alone, whole)
        for name, fork in forks.items():
            if name in changes and fork is not None:
                others[name] = fork.run(lambda: compute_figures(model))
    return Measurement(usual, others, due, answers.blind)


def compute_contributions(
    measurement: Measurement, model: GrowingModel, table: SeedTable, score: Callable[[Figures], float]
) -> Evaluation:
    """What each seed contributes; the score takes the place of accuracy."""
    by_score, by_loss = np.full(table.stage.shape, np.nan), np.full(table.stage.shape, np.nan)
    usual, usual_score = measurement.usual, score(measurement.usual)
    for place, slot in enumerate(model.slots.values()):
        if slot.name in measurement.others:
            other, sign = measurement.others[slot.name], 1.0 if table.blended[0, place] else -1.0
            by_score[0, place] = sign * (usual_score - score(other))
            by_loss[0, place] = sign * (other[LOSS] - usual[LOSS])
    return Evaluation(np.array([usual[LOSS]]), np.array([usual_score]), by_score, by_loss, measurement.due)


def store_contributions(model: GrowingModel, contributions: Floats) -> None:
    """Leave with each seed what it contributes, ``[1, S]``, for `GrowingModel.summary`; NaN: as it was known before."""
    for slot, contribution in zip(model.slots.values(), contributions[0].tolist(), strict=True):
        if slot.seed is not None and math.isfinite(contribution):
            slot.seed.contribution = contribution


T = TypeVar("T")

ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative difference of what is computed of equal rows in one minibatch."""


class Answers:
    """Listens to a model's calls until one of its answers depends on the example."""

    def __init__(self) -> None:
        self._varied = self._heard = False

    @property
    def blind(self) -> bool:
        """Whether examples that differ were all answered alike, in every minibatch; False where that is not known."""
        return self._heard and not self._varied

    def first_of(self, evaluate: Callable[[GrowingModel], T]) -> Callable[[GrowingModel], T]:
        """``evaluate``, to whose first call this listens."""
        calls = itertools.count()

        def listen(model: GrowingModel) -> T:
            if next(calls):
                return evaluate(model)
            handle = model.register_forward_hook(self._hear, with_kwargs=True)
            try:
                return evaluate(model)
            finally:
                handle.remove()

        return listen

    @torch.no_grad()
    def _hear(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if self._varied or torch.compiler.is_compiling():
            return
        try:
            asked, said = _find_rows((arguments, keywords)), _find_rows(output)
        except IncomparableError:
            self._varied = True  # as far as anybody can tell
            return
        said = [rows for rows in said if rows.is_floating_point()]
        if said and any(_have_different_rows(rows) for rows in asked):
            self._heard = True
            self._varied = any(_have_different_rows(rows) for rows in said)


def _find_rows(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that may hold several examples, ``[N, ...]``."""
    leaves = [leaf for leaf in flatten(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.dim() > 0 and len(leaf) > 1 and leaf.numel() and not leaf.is_complex()]


def _have_different_rows(rows: Tensor) -> bool:
    """Whether the examples are not all the same."""
    first = rows[:1]
    if not rows.is_floating_point():
        return bool((rows != first).any())
    return not bool(torch.isclose(rows, first, rtol=ROUNDING, atol=0.0).all())


class Examiner:
    """Examines a model at every decision; in several processes what the first one finds holds for all.

    Args:
        network: The model with its lifecycle table, and the evidence that gates know.
        scores: What growth is about.
        constraints: What is measured, and what must hold.
        evaluate: As for `esper.Grower`.
        passes: How seeds are measured.
        apart: Has the forks that seeds on trial are compared with.
        gradients: Of the training since the last decision.
        listener: Where somebody goes by what blueprints promise.
        processes: Those that the growth is in.
    """

    def __init__(
        self,
        network: GrowingNetwork,
        scores: Scores,
        constraints: ConstraintSet,
        evaluate: Evaluate,
        passes: SharedForwardEvaluator,
        apart: IsolatedTrainer,
        gradients: Gradients,
        listener: Listener | None,
        processes: Processes,
    ) -> None:
        self._processes = processes
        self._network, self._scores, self._constraints, self._evaluate = network, scores, constraints, evaluate
        self._passes, self._apart, self._gradients, self._listener = passes, apart, gradients, listener
        shape = 1, len(passes.model.slots), len(network.specs.kinds)
        self.history = History(*shape, scores.chance_loss, scores.chance_score)
        """What controllers see of the past."""

    def measure(self, train_loss: float, whole: Figures | None, due: Bools) -> Measurement:
        """The model, ``whole`` if that is known, and the seeds in slots that are ``due`` ``[1, S]``.

        Where a constraint is broken any seed that may be pruned for it is due.
        """
        forks = self._apart.ripe_forks()
        measurement = self._processes.agree_on_model(partial(self._measure, whole, due, forks))
        rest = self._suspects & ~due
        if self._constraints.find_broken(measurement.usual) and rest.any():
            more = self._processes.agree_on_model(partial(self._measure, measurement.usual, rest, forks))
            measurement = measurement._replace(others={**measurement.others, **more.others}, due=due | rest)
        self._scores.begin(measurement.usual, train_loss)
        return measurement

    def _measure(
        self, whole: Figures | None, due: Bools, forks: Mapping[str, SeedlessFork | None] = MappingProxyType({})
    ) -> Measurement:
        read = self._constraints.read
        return measure_model(self._passes, self._network.table, self._evaluate, read, whole, due, forks)

    def refer(self) -> None:
        """Measure the model before growth, if a constraint is about that."""
        if self._constraints.limits:
            nothing = np.zeros(self._network.table.stage.shape, np.bool_)
            measurement = self._processes.agree_on_model(partial(self._measure, None, nothing))
            self._constraints.refer_to(measurement.usual)

    def find_culprit(self, measurement: Measurement) -> Bools:
        """The live seed without which constraints are broken by least, bool ``[1, S]``; none, if none is broken or none
        of those that were measured helps.
        """
        suspects, excess = self._suspects, self._constraints.excess
        left = np.full(suspects.shape, excess(measurement.usual))
        before = left.max()
        for place, slot in enumerate(self._passes.model.slots.values()):
            if slot.name in measurement.others and suspects[0, place]:
                left[0, place] = excess(measurement.others[slot.name])
        return (left == left.min()) & (left < before)

    @property
    def _suspects(self) -> Bools:
        """Slots whose seeds count, and are not there for good: bool ``[1, S]``."""
        return self._network.table.live & self._network.table.blended

    def record(self, now: StepInputs, measurement: Measurement, actions: Ints) -> Evaluation:
        """Let history and evidence have what was measured after the last ``actions`` ``[1, 8]``; returns all of it."""
        network, scores = self._network, self._scores
        scores.begin(measurement.usual, now.train_loss)
        self.history.set_chance_level(scores.chance_loss, scores.chance_score)
        newest = compute_contributions(measurement, self._passes.model, network.table, scores.score)
        train_score = scores.train_score(now.train_accuracy)
        host, seeds, health = self._gradients.report()
        accuracy = newest.accuracy if train_score is None else np.array([train_score])
        training = TrainingReport(np.array([now.train_loss]), accuracy, host, seeds, health)
        evaluation = self.history.fill_stale_contributions(newest, network.evidence)
        store_contributions(self._passes.model, evaluation.accuracy_contribution)
        network.evidence = update_evidence(network.table, network.evidence, training, evaluation)
        progress = scores.progress(measurement.usual)
        improved = None if progress is None else np.array([progress])
        self.history.record(actions, network.table, training, evaluation, improved)
        return evaluation

    def prepare(self, decision: int, look: Look | None) -> None:
        """Before anything is measured for the decision of that number, from 1: refuse what could not be decided.

        Raises:
            ConfigError: nothing was heard of training where it matters, or ``look`` is none, or of no use.
        """
        if self._listener is not None:
            self._listener.rest()
        self._processes.agree(lambda: self._prepare(decision, look))

    def _prepare(self, decision: int, look: Look | None) -> None:
        if not isinstance(look, Look | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"look is {describe_value(look)}: give what model.look(loss, batches) returned")
        if look is not None and self._listener is None:
            raise ConfigError("the controller does not go by what blueprints promise: leave look out")
        if self._listener is not None:
            self._listener.prepare(decision, look, trained=self._gradients.stepped)

    def looks_before(self, decision: int) -> bool:
        """Whether what is promised is measured at the decision of that number."""
        return self._listener is not None and self._listener.is_due(decision)

    def listen_before(self, decision: int | None) -> None:
        """Listen, if what is promised matters to the decision of that number; None: to nothing any more."""
        for slot in self._passes.model.slots.values():
            slot.feature_hook = None  # of this or of a former grower
        if self._listener is not None and decision is not None:
            self._listener.listen_before(decision)

    def look_ahead(self, decision: int, look: Look | None, undone: bool) -> None:
        """Measure what is promised before a decision, or take it from ``look``; nothing, if training was ``undone``."""
        listener = self._listener
        if listener is not None:
            free, trained = self._network.table.stage[0] == Stage.DORMANT, self._gradients.stepped
            owed = self._processes.agree(lambda: listener.measure(decision, look, free, trained=trained, undone=undone))
            listener.forget(owed=owed)

    def observe(self, progress: float, horizon: int, config: GrowerConfig, rollbacks: float) -> Observation:
        """What controllers see now, where ``progress`` of so many decisions is over, and that share of rollbacks."""
        view = FeatureInputs(
            self._network,
            self.history,
            np.array([progress]),
            horizon,
            np.array([config.rent]),
            np.array([float(config.train_size)]),
            np.array([rollbacks]),
            None if self._listener is None else self._listener.record,
        )
        return observe(view)

    def measure_dependence(self, slots: Bools) -> tuple[Floats, bool]:
        """What the model loses without each seed in ``slots`` ``[1, S]``, as it is now, ``[1, S]``; for its end.

        And whether none of them is to be kept: its answer is the same to everything, or it breaks a constraint.
        """
        table, score = self._network.table, self._scores.score
        measurement = self._processes.agree_on_model(lambda: self._measure(None, slots))
        contributions = compute_contributions(measurement, self._passes.model, table, score)
        return contributions.accuracy_contribution, measurement.blind or bool(
            self._constraints.find_broken(measurement.usual)
        )
