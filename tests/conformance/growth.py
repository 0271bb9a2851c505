"""A kind of model that grows in its owner's loop."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import esper
from conformance.kind import Kind, tensors
from esper.growth.inputs import call_host
from esper.growth.model import GrowingModel

HORIZON = 12
DECISIONS = 4
"""Until all seeds that were planted at the start count, in part or wholly."""
RATE = 0.01


@dataclass
class Training:
    """A model, all that trains it, and a kind's loop around them."""

    kind: Kind
    model: GrowingModel
    optimizer: torch.optim.Optimizer
    grower: esper.Grower
    epochs: int = 0
    ever: set[str] = field(default_factory=set)
    """Slots in which something was planted."""

    @classmethod
    def of(cls, kind: Kind, controller: str, model: GrowingModel | None = None, **options: Any) -> Training:
        model = kind.attached() if model is None else model
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=RATE))
        told = {"evaluate": kind.validation(), "horizon": HORIZON, **options}
        return cls(kind, model, optimizer, esper.Grower(model, optimizer, controller=controller, **told))

    def go_on(self, decisions: int) -> Training:
        for _ in range(decisions):
            torch.manual_seed(self.epochs)
            loss = self.kind.train(self.model, self.optimizer, seed=self.epochs)
            self.grower.step(train_loss=loss)
            self.ever |= set(self.model.seeds)
            self.epochs += 1
        return self


def grown(kind: Kind, **options: Any) -> Training:
    """With a seed in every slot that counts and learns, long before the planned end."""
    training = Training.of(kind, "all_at_start", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no gradient has reached it")
        training.go_on(DECISIONS)
    assert set(training.model.seeds) == set(training.model.slots)
    assert all(float(seed.alpha) > 0 and not seed.fossilized for seed in training.model.seeds.values())
    return training


@cache
def _grown_once(kind: Kind) -> GrowingModel:
    return grown(kind).model


def grown_model(kind: Kind) -> GrowingModel:
    """A copy of `grown`'s model, for whoever needs no grower."""
    return copy.deepcopy(_grown_once(kind))


def plain_of(model: GrowingModel) -> nn.Module:
    """What `finalize` makes of a model whose seeds are all to stay."""
    model = copy.deepcopy(model)
    for name in model.seeds:
        model.slots[name].fossilize()
    return model.finalize()


def outputs(kind: Kind, model: nn.Module, *, training: bool = False) -> list[Tensor]:
    """All that the model returns on two minibatches, with the same random numbers each time."""
    model.train(training)
    torch.manual_seed(0)
    found: list[Tensor] = []
    for minibatch in kind.minibatches(2, seed=500):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.autocast), torch.set_grad_enabled(training):
            found += [tensor.detach().clone() for tensor in tensors(call_host(model, minibatch.inputs))]
    assert found
    return found
