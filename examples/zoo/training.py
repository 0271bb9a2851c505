"""What the examples do with a host and its data: build it with slots, train it for an epoch, measure it.

All randomness follows from a seed and the number of what is drawn, so that equal seeds give equal figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.errors import TaskError
from esper.growth.blueprints import get
from zoo.data import TASKS, Labelled, Minibatch, Splits, Windows
from zoo.hosts import HOSTS, HostKind

HOST, SEEDS, ORDER = range(3)
"""Numbers of a run's random streams: the host's first weights, those of seeds, the order of minibatches."""
EVALUATION_BATCH = 512
"""Examples in one forward pass; bounds memory."""


class Score(NamedTuple):
    """How a classifier does: on data that it only reads, or in the minibatches that it learns from."""

    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""


def host_for(task: str, host: str | None = None) -> str:
    """The name of a host that reads the task, by default the one that suits it best.

    Raises:
        TaskError: there is no such task or host, or the host cannot read it.
    """
    if task not in TASKS:
        raise TaskError(f"no task is called {task!r}: choose from {', '.join(TASKS)}")
    name = host or TASKS[task][0]
    if name not in HOSTS:
        raise TaskError(f"no host is called {name!r}: choose from {', '.join(HOSTS)}")
    if name not in TASKS[task]:
        raise TaskError(f"host {name!r} cannot read task {task!r}: choose from {', '.join(TASKS[task])}")
    return name


def build_model(host: str, splits: Splits, seed: int) -> esper.GrowingModel:
    """A fresh host on the device of its data, with a dormant slot behind each of its sites."""
    inputs = next(splits.train.in_order(2)).inputs
    network = HOSTS[host].build(tuple(inputs.shape[1:]), splits.classes, torch_generator(seed, HOST))
    return esper.attach(network.to(inputs.device), HOSTS[host].slots, inputs)


def plant_largest(model: esper.GrowingModel, seed: int) -> None:
    """Fill every slot for good, before the first step, with the largest blueprint that it offers."""
    for place, slot in enumerate(model.slots.values()):
        largest = max(slot.blueprints, key=lambda name, site=slot.site: get(name).cost_at(site).parameters)
        slot.germinate(largest, torch_generator(seed, SEEDS, place), alpha=1.0)
        slot.fossilize()


def make_optimizer(model: esper.GrowingModel, kind: HostKind) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) at the host's constant rate."""
    return torch.optim.AdamW(model.parameter_groups(lr=kind.learning_rate, weight_decay=kind.weight_decay))


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Labelled | Windows,
    batch_size: int,
    rng: np.random.Generator,
    before_backward: Callable[[Tensor, Minibatch], object] | None = None,
) -> Score:
    """One pass over the examples in an order drawn from ``rng``.

    ``before_backward`` takes each loss and its minibatch: `Grower.isolated_backward`, which trains forks.
    """
    model.train()
    scores: list[Tensor] = []
    targets = 0
    for batch in examples.epoch(batch_size, rng):
        optimizer.zero_grad()
        logits = model(batch.inputs)
        loss = cross_entropy(logits, batch)
        if before_backward is not None:
            before_backward(loss, batch)
        loss.backward()
        optimizer.step()
        scores.append(sum_up(logits.detach(), batch, loss.detach()))
        targets += batch.targets.numel()
    return Score(*(torch.stack(scores).sum(0) / targets).tolist())


@torch.no_grad()
def measure(model: nn.Module, examples: Labelled | Windows) -> Score:
    """Mean cross-entropy and accuracy in evaluation mode; the model stays in its own."""
    was_training = model.training
    model.eval()
    scores: list[Tensor] = []
    targets = 0
    for batch in examples.in_order(EVALUATION_BATCH):
        logits = model(batch.inputs)
        scores.append(sum_up(logits, batch, cross_entropy(logits, batch)))
        targets += batch.targets.numel()
    model.train(was_training)
    return Score(*(torch.stack(scores).sum(0) / targets).tolist())


def cross_entropy(logits: Tensor, batch: Minibatch) -> Tensor:
    """Mean over all targets: logits ``[B, classes]`` or ``[B, T, classes]``."""
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


def example_losses(model: nn.Module, batch: Minibatch) -> Tensor:
    """Mean cross-entropy over the targets of each example, ``[B]``, as `GrowingModel.look` takes it."""
    logits, targets = model(batch.inputs), batch.targets
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(1)


def sum_up(logits: Tensor, batch: Minibatch, loss: Tensor) -> Tensor:
    """The sum of losses, and how many are right, as float64 ``[2]`` that stays on its device."""
    right = (logits.argmax(-1) == batch.targets).sum()
    return torch.stack([loss.double() * batch.targets.numel(), right.double()])


def numpy_generator(seed: int, *key: int) -> np.random.Generator:
    """The generator that the seed's random stream of that number draws from."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def torch_generator(seed: int, *key: int) -> torch.Generator:
    """The same for torch, on the CPU."""
    return torch.Generator().manual_seed(int(numpy_generator(seed, *key).integers(np.iinfo(np.int64).max)))
