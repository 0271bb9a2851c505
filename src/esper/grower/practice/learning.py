"""One epoch of training, and measuring what it led to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.grower.grower import Grower
from esper.grower.measuring import Score
from esper.growth.model import GrowingModel
from esper.tasks.practice.examples import Examples, Minibatch

EVALUATION_BATCH = 512
"""Examples in one forward pass; bounds memory."""


class Learned(NamedTuple):
    """An epoch of training."""

    loss: float
    """Mean over its minibatches, in nats."""
    accuracy: float
    """Fraction that was right, in [0, 1], while learning."""
    examples: int
    """How many the model learned from."""


def learn_epoch(grower: Grower, examples: Examples, size: int, rng: np.random.Generator) -> Learned:
    """One pass over ``examples`` in minibatches of ``size``, in an order drawn from ``rng``."""
    model, optimizer = grower.model, grower.optimizer
    model.train()
    tally = _Tally()
    for batch in examples.epoch(size, rng):
        optimizer.zero_grad()
        logits = model(batch.inputs)
        loss = cross_entropy(logits, batch)
        grower.learn_apart(loss, batch)
        loss.backward()
        optimizer.step()
        tally.add(logits.detach(), batch, loss.detach())
    score = tally.score()
    return Learned(score.loss, score.accuracy, tally.examples)


@torch.no_grad()
def measure(model: GrowingModel, examples: Examples) -> Score:
    """Mean cross-entropy in nats and accuracy over all that is to be predicted."""
    was_training = model.training
    model.eval()
    tally = _Tally()
    for batch in examples.in_order(EVALUATION_BATCH):
        logits = model(batch.inputs)
        tally.add(logits, batch, cross_entropy(logits, batch))
    model.train(was_training)
    return tally.score()


def cross_entropy(logits: Tensor, batch: Minibatch) -> Tensor:
    """Mean over all targets: logits ``[B, classes]`` or ``[B, T, classes]``."""
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


class _Tally:
    """Sums over batches, kept on their device until asked for."""

    def __init__(self) -> None:
        self.examples = 0
        self._targets = 0
        self._parts: list[Tensor] = []

    def add(self, logits: Tensor, batch: Minibatch, loss: Tensor) -> None:
        right = (logits.argmax(-1) == batch.targets).sum()
        self._parts.append(torch.stack([loss.double() * batch.targets.numel(), right.double()]))
        self._targets += batch.targets.numel()
        self.examples += len(batch.targets)

    def score(self) -> Score:
        sums = torch.stack(self._parts).sum(0)
        return Score(float(sums[0]) / self._targets, float(sums[1]) / self._targets)
