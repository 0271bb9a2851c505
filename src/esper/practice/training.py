"""A host that learns a task while it grows: its slots, its epochs, its scores, and what they cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.rules.simple import Never
from esper.grower.decision import Decision
from esper.grower.grower import Grower
from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.numerics.devices import usable_device
from esper.numerics.random_streams import child_generator
from esper.population.budget import TRAINING_PASSES
from esper.practice.settings import ALL_FROM_START, GrowSettings
from esper.tasks.practice.examples import Examples, Minibatch, Splits
from esper.tasks.practice.registry import get_host

HOST, SEEDS, ORDER = range(3)
"""Keys of a run's random streams."""
PROBED = 2
"""Examples that show the host's shapes."""
EVALUATION_BATCH = 512
"""Examples in one forward pass; bounds memory."""


class ClassifierScore(NamedTuple):
    """How a classifier does: on data that it only reads, or in the minibatches that it learns from."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data, and the decision at its end."""

    number: int
    """From 1."""
    total: int
    training: ClassifierScore
    validation: ClassifierScore
    """Before the decision, and before a rollback if there was one."""
    decision: Decision
    added_parameters: int
    """Parameters of all seeds after the decision."""
    training_flops: int
    """In this epoch."""
    learning_seconds: float
    seconds: float
    """For learning, measuring and deciding."""


class HostTraining:
    """A host in training, its optimizer and its grower: whatever a run needs but its directory.

    Raises:
        SlotError, UnknownBlueprintError: the host cannot grow as the settings say.
        ConfigError: there is no such controller, or no such device on this machine.
        RunError, CheckpointError: the run to take the policy from is unusable.
    """

    def __init__(self, settings: GrowSettings, splits: Splits) -> None:
        self.settings = settings
        self.splits = splits.to(usable_device(settings.device))
        self.model = build_host(settings, self.splits)
        assert self.model.host_flops is not None, "torch can count the FLOPs of all hosts that practise"
        self._host_flops = self.model.host_flops
        if settings.controller == ALL_FROM_START:
            for place, slot in enumerate(self.model.slots.values()):
                generator = _generator(settings.seed, SEEDS, place)
                # Of the blends the one that rules take.
                slot.germinate(_dearest(slot), generator, blend=min(settings.rules.blends), alpha=1.0)
                slot.fossilize()
        self.optimizer = torch.optim.AdamW(
            self.model.parameter_groups(lr=settings.learning_rate, weight_decay=settings.weight_decay)
        )
        self.grower = Grower(
            self.model,
            self.optimizer,
            Never() if settings.controller == ALL_FROM_START else settings.controller,
            evaluate=self._validate,
            classes=splits.classes,
            horizon=settings.epochs,
            rules=settings.rules,
            conduct=settings.conduct,
            rent=settings.rent,
            train_size=len(splits.train),
            seed=settings.seed,
            loss=self._loss,
            evidence=settings.evidence,
        )

    def epoch(self, number: int) -> Epoch:
        """The epoch of that number, from 1: one pass over the training data, and a decision.

        Raises:
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
        """
        began, settings, slots = time.perf_counter(), self.settings, self.model.slots
        forward = self._host_flops + count_seed_flops(*slots.values())
        # Each fork goes without the seed of the slot that it is named by.
        forks = sum(forward - count_seed_flops(slots[name]) for name in self.grower.apart.forks)
        # Of its own for every epoch, so that a resumed run need not know what was drawn before.
        training, examples = self._learn(child_generator(settings.seed, ORDER, number))
        learning_seconds = time.perf_counter() - began
        validation = self._validate(self.model)
        decision = self.grower.step(
            train_loss=training.loss,
            val_loss=validation.loss,
            accuracy=validation.accuracy,
            train_accuracy=training.accuracy,
        )
        return Epoch(
            number,
            settings.epochs,
            training,
            validation,
            decision,
            self.model.added_parameters,
            TRAINING_PASSES * examples * (forward + forks),
            learning_seconds,
            time.perf_counter() - began,
        )

    def test(self) -> ClassifierScore:
        """On data that nothing else reads."""
        return measure(self.model, self.splits.test)

    def _learn(self, rng: np.random.Generator) -> tuple[ClassifierScore, int]:
        """One pass over the training data in an order drawn from ``rng``: how it went, and examples learned from."""
        self.model.train()
        sums = _ScoreSums()
        for batch in self.splits.train.epoch(self.settings.batch_size, rng):
            self.optimizer.zero_grad()
            logits = self.model(batch.inputs)
            loss = cross_entropy(logits, batch)
            self.grower.learn_apart(loss, batch)
            loss.backward()
            self.optimizer.step()
            sums.add(logits.detach(), batch, loss.detach())
        return sums.score(), sums.examples

    def _loss(self, batch: Minibatch) -> Tensor:
        return cross_entropy(self.model(batch.inputs), batch)

    def _validate(self, model: GrowingModel) -> ClassifierScore:
        return measure(model, self.splits.validation)


def build_host(settings: GrowSettings, splits: Splits) -> GrowingModel:
    """A fresh host with dormant slots."""
    inputs = first_inputs(splits.train)
    build = get_host(settings.host).build
    host = build(tuple(inputs.shape[1:]), splits.classes, _generator(settings.seed, HOST))
    return attach(host.to(settings.device), settings.slots, inputs)


def first_inputs(examples: Examples) -> Tensor:
    """Enough of them to show what the host reads."""
    return next(examples.in_order(PROBED)).inputs


def _generator(seed: int, *key: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(child_generator(seed, *key).integers(np.iinfo(np.int64).max)))


def _dearest(slot: Slot) -> str:
    """The blueprint with most parameters that the slot offers."""
    return max(slot.blueprints, key=lambda name: get(name).parameters_at(slot.site))


@torch.no_grad()
def measure(model: GrowingModel, examples: Examples) -> ClassifierScore:
    """Mean cross-entropy in nats and accuracy over all that is to be predicted."""
    was_training = model.training
    model.eval()
    sums = _ScoreSums()
    for batch in examples.in_order(EVALUATION_BATCH):
        logits = model(batch.inputs)
        sums.add(logits, batch, cross_entropy(logits, batch))
    model.train(was_training)
    return sums.score()


def cross_entropy(logits: Tensor, batch: Minibatch) -> Tensor:
    """Mean over all targets: logits ``[B, classes]`` or ``[B, T, classes]``."""
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


def example_losses(model: nn.Module, batch: Minibatch) -> Tensor:
    """Mean cross-entropy over the targets of each example, ``[B]``, as `GrowingModel.look` wants it."""
    logits, targets = model(batch.inputs), batch.targets
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(1)


class _ScoreSums:
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

    def score(self) -> ClassifierScore:
        sums = torch.stack(self._parts).sum(0)
        return ClassifierScore(float(sums[0]) / self._targets, float(sums[1]) / self._targets)


def count_seed_flops(*slots: Slot) -> int:
    """FLOPs of one forward pass for one example through the seeds that are in these slots, as blueprints count them."""
    return sum(0 if slot.seed is None else slot.seed.flops_at(slot.site) for slot in slots)
