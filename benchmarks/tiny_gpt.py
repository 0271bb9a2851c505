"""A causal transformer on the characters of a text that comes with Python, small enough to train hundreds of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import WINDOW, Labelled, Splits, Windows, load
from zoo.hosts import TransformerBlock

import esper
from esper.tasks.language_suite import read_text

WIDTH, HEADS, BATCH, WEIGHT_DECAY = 16, 2, 16, 0.1
BLUEPRINTS = ["block_copy", "block_zero"]
TextName = Literal["help", "asyncio"]
CHOOSING_TEXT: TextName = "help"
"""Python's documentation, on which all is chosen."""
OTHER_TEXT: TextName = "asyncio"
"""The sources of a package of the standard library, of the same length, on which nothing is."""


class Gpt(nn.Module):
    """Indices int64 ``[B, T]`` to logits ``[B, T, classes]``."""

    def __init__(self, depth: int, classes: int, width: int = WIDTH) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(classes, width), nn.Embedding(WINDOW, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, HEADS, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.characters(indices) + self.positions.weight[: indices.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def attach(network: Gpt) -> esper.GrowingModel:
    """With a slot behind each block."""
    slots = {f"blocks.{index}": BLUEPRINTS for index in range(len(network.blocks))}
    example = torch.zeros(2, WINDOW, dtype=torch.int64, device=network.head.weight.device)
    return esper.attach(network, slots, example)


def make_optimizer(model: esper.GrowingModel, rate: float) -> torch.optim.AdamW:
    """Of the model's groups, to which growth belongs."""
    optimizer = make_adamw(model.parameter_groups(lr=rate), rate)
    model.link(optimizer)
    return optimizer


def make_adamw(parameters: Iterable[Any], rate: float) -> torch.optim.AdamW:
    """Of parameters or groups."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, minibatch: tuple[Tensor, Tensor]) -> Tensor:
    """One step; returns the loss before it."""
    inputs, targets = minibatch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    step_down(model, optimizer, loss)
    return loss.detach()


def step_down(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of a loss that the model gave."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@cache
def text(name: TextName) -> Splits:
    """Split by position."""
    if name == CHOOSING_TEXT:
        return load("charlm")
    with TemporaryDirectory() as folder:
        path = Path(folder, "sources.py")
        path.write_text(read_text("sources"), encoding="utf-8")
        return load("charlm", text=path)


def endless(part: Labelled | Windows, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches, epoch after epoch."""
    while True:
        yield from part.epoch(BATCH, rng)


class Stream:
    """Minibatches by the number of the step, so that a training that was killed goes on with the same ones."""

    def __init__(self, part: Labelled | Windows, seed: int) -> None:
        self._part, self._seed = part, seed
        self._restart()

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if step < self._next:
            self._restart()
        for _ in range(self._next, step):
            next(self._minibatches)
        self._next = step + 1
        return next(self._minibatches)

    def _restart(self) -> None:
        self._minibatches, self._next = endless(self._part, np.random.default_rng(self._seed)), 0


@torch.no_grad()
def measure(model: nn.Module, minibatches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean loss per character, in nats; leaves the model in the mode of evaluation."""
    model.eval()
    losses, count = 0.0, 0
    for inputs, targets in minibatches:
        losses += float(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return losses / count
