"""Measure one model and what its seeds contribute, and make of it what controllers see and gates know.

Seeds are measured by switching each of them off, or against forks that do without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.control.history import History
from esper.grower.arguments import StepInputs
from esper.grower.gradients import Gradients
from esper.grower.passes import IncomparableError, Passes, flatten
from esper.grower.refit import Refit
from esper.grower.scores import LOSS, Figures, Scores, check_figures
from esper.grower.subject import ModelSubject
from esper.growth.model import GrowingModel
from esper.growth.side_pass import keep_modes
from esper.lifecycle.table import SeedTable
from esper.training.evaluation import Evaluation, update_evidence
from esper.training.learning import TrainingReport

Bools = NDArray[np.bool_]


class Score(NamedTuple):
    """How a classifier does on validation data."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""


Number: TypeAlias = float | Tensor
"""A tensor holds a single one."""
Evaluate: TypeAlias = Callable[[GrowingModel], Number | tuple[Number, Number] | Mapping[str, Number]]
"""Measures a model on validation data: a loss, a pair of loss and accuracy, or figures by name with ``loss`` among
them. The data and the device are its business; the same model must give the same figures. It may leave the model in
`eval` mode."""


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


def measure_seeds(
    passes: Passes | Refit, table: SeedTable, evaluate: Evaluate, whole: Figures | None, due: Bools
) -> Measurement:
    """Measure the model as it is, and with each seed that is ``due``, bool ``[1, S]``, at another weight.

    A seed that counts is to be compared with its absence, in the model or in a fork of it; one that does not count yet
    is put in at full weight, to be compared with the model as it is. ``whole`` is the former figure, if it is known.

    Raises:
        ConfigError: ``evaluate`` returns what is none of its figures.
    """
    changes = {
        slot.name: 0.0 if table.blended[0, place] else 1.0
        for place, slot in enumerate(passes.model.slots.values())
        if slot.seed is not None and due[0, place]
    }
    answers = Answers()
    measure = answers.first_of(evaluate) if whole is None else evaluate
    with keep_modes(passes.model):
        usual, others = passes.measure(lambda model: check_figures(measure(model)), changes, whole)
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


def store_contributions(model: GrowingModel, contributions: NDArray[np.float64]) -> None:
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

    @contextmanager
    def of(self, model: GrowingModel) -> Generator[None]:
        """Listen within the block."""
        handle = model.register_forward_hook(self._hear, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def first_of(self, evaluate: Callable[[GrowingModel], T]) -> Callable[[GrowingModel], T]:
        """``evaluate``, to whose first call this listens."""
        calls = 0

        def listen(model: GrowingModel) -> T:
            nonlocal calls
            calls += 1
            if calls > 1:
                return evaluate(model)
            with self.of(model):
                return evaluate(model)

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
    """Examines ``model`` at every decision.

    Args:
        model: The one that grows.
        subject: Its lifecycle table, and the evidence that gates know.
        scores: What growth is about.
        evaluate: As for `esper.Grower`.
        passes: How it is measured.
        refit: The forks that seeds on trial are compared with.
        gradients: Of the training since the last decision.
    """

    def __init__(
        self,
        model: GrowingModel,
        subject: ModelSubject,
        scores: Scores,
        evaluate: Evaluate,
        passes: Passes,
        refit: Refit,
        gradients: Gradients,
    ) -> None:
        self._model, self._subject, self._scores, self._evaluate = model, subject, scores, evaluate
        self._passes, self._refit, self._gradients = passes, refit, gradients
        shape = 1, len(model.slots), len(subject.specs.kinds)
        self.history = History(*shape, scores.chance_loss, scores.chance_score)
        """What controllers see of the past."""

    def measure(self, train_loss: float, whole: Figures | None, due: NDArray[np.bool_]) -> Measurement:
        """The model, ``whole`` if that is known, and the seeds in slots that are ``due`` ``[1, S]``."""
        found = measure_seeds(self._refit, self._subject.table, self._evaluate, whole, due)
        self._scores.begin(found.usual, train_loss)
        return found

    def take_in(
        self, now: StepInputs, found: Measurement, actions: NDArray[np.int64]
    ) -> tuple[TrainingReport, Evaluation]:
        """Let history and evidence have what was measured after the last ``actions`` ``[1, 8]``."""
        subject, scores = self._subject, self._scores
        scores.begin(found.usual, now.train_loss)
        self.history.expect(scores.chance_loss, scores.chance_score)
        newest = compute_contributions(found, self._model, subject.table, scores.score)
        known = scores.train_score(now.train_accuracy)
        host, seeds, health = self._gradients.report()
        training = TrainingReport(
            np.array([now.train_loss]), newest.accuracy if known is None else np.array([known]), host, seeds, health
        )
        evaluation = self.history.complete(newest, subject.evidence)
        store_contributions(self._model, evaluation.accuracy_contribution)
        subject.evidence = update_evidence(subject.table, subject.evidence, training, evaluation)
        progress = scores.progress(found.usual)
        improved = None if progress is None else np.array([progress])
        self.history.record(actions, subject.table, training, evaluation, improved)
        return training, evaluation

    def dependence(self, slots: NDArray[np.bool_]) -> tuple[NDArray[np.float64], bool]:
        """What the model loses without each seed in ``slots`` ``[1, S]``, as it is now, ``[1, S]``; for its end.

        And whether that is blind: its answer is the same to everything.
        """
        subject = self._subject
        found = measure_seeds(self._passes, subject.table, self._evaluate, None, slots)
        return compute_contributions(
            found, self._model, subject.table, self._scores.score
        ).accuracy_contribution, found.blind
