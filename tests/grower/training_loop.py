"""A small model that grows in a plain loop, with all that such a loop owns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel
from esper.control.controller import Controller
from esper.grower.evaluation import Evaluate
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Rules
from esper.serialization.state_files import pack_state

CLASSES = 3
WIDTH = 8
SLOTS = {"0": ["mlp", "norm"], "2": ["mlp", "lowrank"]}


def data(examples: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points in three interleaved rings."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(examples, 4, generator=generator)
    return points, (points.norm(dim=1) * CLASSES / math.pi).long().clamp(max=CLASSES - 1)


def host(seed: int = 0) -> nn.Module:
    """Two hidden layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


HELD = Rules(operations=(Op.WAIT, Op.GERMINATE))
"""What germinates is held for good."""


def growing(seed: int = 0, *, frozen: bool = False) -> GrowingModel:
    """`host` with two slots."""
    return esper.attach(host(seed), SLOTS, torch.zeros(2, 4), freeze_host=frozen)


@torch.no_grad()
def validate(model: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on points of its own."""
    model.eval()
    inputs, labels = data(64, seed=1)
    logits = model(inputs)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


def with_evidence(evidence: str, evaluate: Evaluate = validate) -> Evaluate:
    """``evaluate`` for a grower that judges seeds on trial by this evidence: ``dependence`` or ``refit``."""
    return esper.Refit(evaluate) if evidence == "refit" else evaluate


def packed(state: dict[str, Any]) -> Tensor:
    """A grower's state but for what was spent: no two runs take the same seconds."""
    return pack_state({**state, "memory": {name: part for name, part in state["memory"].items() if name != "spending"}})


def remembered(grower: Grower) -> Tensor:
    """Such a state without that of torch's global generator, which trainers need not restore."""
    state = grower.state_dict()
    del state["memory"]["snapshot"]["generators"]
    return packed(state)


class Loop:
    """Model, optimizer, scheduler and grower."""

    def __init__(self, controller: str | Controller, model: GrowingModel | None = None, **options: Any) -> None:
        self.model = growing() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=1000)
        told = {"evaluate": validate, "horizon": 20, **options}
        self.grower = Grower(self.model, self.optimizer, controller=controller, **told)
        self.inputs, self.labels = data()

    def epoch(self, told: Callable[[float], float] = float) -> esper.Decision:
        """Two minibatches and a decision; the grower hears ``told(loss)``."""
        self.model.train()
        total = 0.0
        for half in (slice(0, 48), slice(48, 96)):
            loss = F.cross_entropy(self.model(self.inputs[half]), self.labels[half])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            total += loss.item() / 2
        return self.grower.step(train_loss=told(total))

    def saved(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "grower": self.grower.state_dict(),
        }
