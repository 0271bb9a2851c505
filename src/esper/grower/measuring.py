"""What a model's seeds contribute, found by switching each of them off, or against forks that do without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esper.grower.passes import Passes
from esper.grower.refit import Refit
from esper.growth.model import GrowingModel
from esper.growth.modes import modes_kept
from esper.lifecycle.table import SeedTable
from esper.training.evaluation import Evaluation

Bools = NDArray[np.bool_]


class Score(NamedTuple):
    """How a model does on validation data."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""


Evaluate: TypeAlias = Callable[[GrowingModel], "Score | tuple[float, float]"]
"""Measures a model on validation data: loss and accuracy. The data and the device are its business; the same model must
give the same figures. It may leave the model in `eval` mode."""


def measured(
    passes: Passes | Refit, table: SeedTable, evaluate: Evaluate, whole: Score | None, due: Bools
) -> Evaluation:
    """The model as it is, and counterfactuals of the seeds in slots that are ``due``, bool ``[1, S]``.

    A seed that counts is compared with its absence, in the model or in a fork of it; one that does not count yet is put
    in at full weight and compared with the model as it is. ``whole`` is the former figure, if it is known already.
    """
    slots = passes.model.slots.values()
    changes = {
        slot.name: 0.0 if table.blended[0, place] else 1.0
        for place, slot in enumerate(slots)
        if slot.seed is not None and due[0, place]
    }
    with modes_kept(passes.model):
        usual, others = passes.measure(lambda model: Score(*evaluate(model)), changes, whole)
    by_accuracy = np.full(table.stage.shape, np.nan)
    by_loss = np.full(table.stage.shape, np.nan)
    for place, slot in enumerate(slots):
        if slot.name in others:
            other, sign = others[slot.name], 1.0 if table.blended[0, place] else -1.0
            by_accuracy[0, place] = sign * (usual.accuracy - other.accuracy)
            by_loss[0, place] = sign * (other.loss - usual.loss)
    return Evaluation(np.array([usual.loss]), np.array([usual.accuracy]), by_accuracy, by_loss, due)


def note(model: GrowingModel, evaluation: Evaluation) -> None:
    """Leave with each seed what it contributes, for `GrowingModel.summary`."""
    for slot, contribution in zip(model.slots.values(), evaluation.accuracy_contribution[0].tolist(), strict=True):
        if slot.seed is not None:
            slot.seed.contribution = contribution
