"""A host in training, its optimizer and its grower."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.control.rules.simple import Never
from esper.devices import usable_device
from esper.grower.decision import Decision
from esper.grower.grower import Grower
from esper.grower.measuring import Score
from esper.grower.practice.flops import fork_flops, forward_flops, seed_flops, training_flops
from esper.grower.practice.learning import Learned, cross_entropy, learn_epoch, measure
from esper.grower.practice.network import ORDER, fill, first_inputs, growing_host
from esper.grower.practice.settings import ALL_FROM_START, GrowSettings
from esper.growth.model import GrowingModel
from esper.tasks.data import stream
from esper.tasks.practice.examples import Minibatch, Splits


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data, and the decision at its end."""

    number: int
    """From 1."""
    total: int
    learned: Learned
    validation: Score
    """Before the decision, and before a rollback if there was one."""
    decision: Decision
    added_parameters: int
    """Of all seeds there are after the decision."""
    training_flops: int
    """Of this epoch."""
    learning_seconds: float
    seconds: float
    """Of learning, measuring and deciding."""


class Growth:
    """Whatever a run needs but its directory.

    Raises:
        SlotError, UnknownBlueprintError: the host cannot grow as the settings say.
        ConfigError: there is no such controller, or no such device on this machine.
        RunError, CheckpointError: the run to take the policy from is unusable.
    """

    def __init__(self, settings: GrowSettings, splits: Splits) -> None:
        self.settings = settings
        self.splits = splits.to(usable_device(settings.device))
        self.model = growing_host(settings, self.splits)
        self._forward_flops = forward_flops(self.model, first_inputs(self.splits.train))
        if settings.controller == ALL_FROM_START:
            fill(self.model, settings.seed, min(settings.rules.blends))  # the one that rules take
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
        began = time.perf_counter()
        settings = self.settings
        forward = self._forward_flops + seed_flops(self.model)
        forward += fork_flops(self.model, self.grower.refit.forks, forward)
        # Of its own for every epoch, so that a resumed run need not know what was drawn before.
        order = stream(settings.seed, ORDER, number)
        learned = learn_epoch(self.grower, self.splits.train, settings.batch_size, order)
        learning_seconds = time.perf_counter() - began
        validation = self._validate(self.model)
        decision = self.grower.step(
            train_loss=learned.loss,
            val_loss=validation.loss,
            accuracy=validation.accuracy,
            train_accuracy=learned.accuracy,
        )
        return Epoch(
            number,
            settings.epochs,
            learned,
            validation,
            decision,
            self.added_parameters,
            training_flops(forward, learned.examples),
            learning_seconds,
            time.perf_counter() - began,
        )

    def test(self) -> Score:
        """On data that nothing else reads."""
        return measure(self.model, self.splits.test)

    @property
    def added_parameters(self) -> int:
        """Of all seeds there are."""
        return sum(parameter.numel() for seed in self.model.seeds.values() for parameter in seed.parameters())

    def _loss(self, batch: Minibatch) -> Tensor:
        return cross_entropy(self.model(batch.inputs), batch)

    def _validate(self, model: GrowingModel) -> Score:
        return measure(model, self.splits.validation)
