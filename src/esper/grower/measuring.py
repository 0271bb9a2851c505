"""What a model's seeds contribute, found by switching each of them off, or against forks that do without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.grower.answers import Answers
from esper.grower.figures import LOSS, Figures, figures
from esper.grower.passes import Passes
from esper.grower.refit import Refit
from esper.growth.model import GrowingModel
from esper.growth.modes import modes_kept
from esper.lifecycle.table import SeedTable
from esper.training.evaluation import Evaluation

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


def measured(
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
    with modes_kept(passes.model):
        usual, others = passes.measure(lambda model: figures(measure(model)), changes, whole)
    return Measurement(usual, others, due, answers.blind)


def compared(
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


def note(model: GrowingModel, contributions: NDArray[np.float64]) -> None:
    """Leave with each seed what it contributes, ``[1, S]``, for `GrowingModel.summary`; NaN: as it was known before."""
    for slot, contribution in zip(model.slots.values(), contributions[0].tolist(), strict=True):
        if slot.seed is not None and math.isfinite(contribution):
            slot.seed.contribution = contribution
