"""Train every network of a population for one minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.training.gradients.health import HealthTable
from esper.training.gradients.rows import by_slot, row_norms, seed_health
from esper.training.optimizers import clip_by_network, optimizer_step
from esper.training.passes import Pass, as_trained, prepared, shadow
from esper.training.pending import Floats, Pending
from esper.training.pool import Pool, flat
from esper.training.population import Population


class Batch(NamedTuple):
    """One minibatch per network."""

    inputs: Tensor
    """``[E, B, ...]``."""
    labels: Tensor
    """int64 ``[E, B]``."""


@dataclass(frozen=True)
class TrainingReport:
    """What training for one decision looked like, per network."""

    loss: Floats
    """Mean cross-entropy in nats over the minibatches, ``[E]``."""
    accuracy: Floats
    """Mean over the minibatches, ``[E]``."""
    host_gradient: Floats
    """Norm of the hosts' gradients in the last minibatch, ``[E]``."""
    seed_gradient: Floats
    """Norm of the seeds' gradients in the last minibatch, ``[E, S]``; 0 without a seed that learns."""
    health: HealthTable
    """Of the seeds' gradients over all minibatches, ``[E, S]``; resting networks have no seed that learns."""


def network_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each network, ``[E]``, from logits ``[E, N, classes]`` and labels ``[E, N]``."""
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def network_accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of each network's examples that are classified correctly, ``[..., E]``.

    From logits ``[..., E, N, classes]`` and labels ``[..., E, N]``.
    """
    # The first largest, as argmax says too, which is ten times slower where the classes are not innermost.
    return (logits.max(-1).indices == labels).to(logits.dtype).mean(-1)


def train(population: Population, batches: Iterable[Batch], resting: NDArray[np.bool_] | None = None) -> TrainingReport:
    """As `start_training`, whose report it waits for."""
    return start_training(population, batches, resting).fetch()


def start_training(
    population: Population, batches: Iterable[Batch], resting: NDArray[np.bool_] | None = None
) -> Pending[TrainingReport]:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they count fully and all else is frozen. The
    networks' losses are added up, so no network's gradient depends on how many others there are. The networks
    ``resting``, bool ``[E]``, keep all their values and buffers (None: all learn). The report must be fetched before
    seeds come or go.
    """
    population.execution.train(True)
    rest = _Rest(population, resting) if resting is not None and resting.any() else None
    pool = population.pool
    started = _started(population)
    if rest is not None:
        started &= ~rest.rows
    objective = _Objective(population)
    losses: list[Tensor] = []
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        learned = objective(batch)
        _step(population, pool, learned.gradients, started, rest)
        losses.append(learned.losses)
        logits.append(learned.logits)
        labels.append(batch.labels)
        norms.append(row_norms(learned.gradients))
    if rest is not None:
        rest.restore_buffers(population)
    accuracies = network_accuracies(torch.stack(logits), torch.stack(labels))
    learning = _learning(population.table) & (True if resting is None else ~resting[:, None])

    def report(loss: Floats, accuracy: Floats, by_row: Floats) -> TrainingReport:
        hosts, seeds = by_slot(population, by_row)
        return TrainingReport(loss, accuracy, hosts[-1], seeds[-1], seed_health(population, hosts, seeds, learning))

    return Pending((torch.stack(losses).mean(0), accuracies.mean(0), torch.stack(norms)), report)


class _Rest:
    """Networks that must not change while the others learn."""

    def __init__(self, population: Population, resting: NDArray[np.bool_]) -> None:
        networks = torch.from_numpy(resting)
        self.rows = networks[population.pool.owners].to(population.plan.device, non_blocking=True)
        """Rows of the pool that belong to them, bool ``[R]``."""
        self._networks = networks.to(population.plan.device, non_blocking=True)
        self._buffers = {name: buffer[self._networks] for name, buffer in population.host_buffers.items()}

    def restore_buffers(self, population: Population) -> None:
        for name, buffer in population.host_buffers.items():
            buffer[self._networks] = self._buffers[name]


class _Learned(NamedTuple):
    """What a minibatch says of some networks."""

    losses: Tensor
    """``[e]``."""
    logits: Tensor
    """``[e, B, classes]``."""
    gradients: list[Tensor]
    """Of all rows, ``[R, P]`` per block; zero where nothing depends on them."""


class _Objective:
    """Differentiates the sum of the networks' losses, pass by pass, so that only one pass's graph is held at a time."""

    def __init__(self, population: Population) -> None:
        self._blocks = population.blocks
        self._leaves = [leaf for block in self._blocks for leaf in block.parameters.values()]
        self._host = population.host.parameters
        self._frozen = {name: stacked.detach() for name, stacked in self._host.items()}
        self._whole = prepared(population, as_trained(population)).passes
        isolated = shadow(population)
        self._alone = [None] * len(self._whole) if isolated is None else prepared(population, isolated).passes

    def __call__(self, batch: Batch) -> _Learned:
        found = [self._one(*passes, batch) for passes in zip(self._whole, self._alone, strict=True)]
        if len(found) == 1:
            return found[0]
        by_block = zip(*(one.gradients for one in found), strict=True)
        return _Learned(
            torch.cat([one.losses for one in found]),
            torch.cat([one.logits for one in found]),
            [torch.stack(parts).sum(0) for parts in by_block],
        )

    def _one(self, whole: Pass, alone: Pass | None, batch: Batch) -> _Learned:
        inputs, labels = batch.inputs[whole.networks], batch.labels[whole.networks]
        logits = whole.run(inputs, self._host)
        losses = network_losses(logits, labels)
        total = losses.sum()
        if alone is not None:
            total = total + network_losses(alone.run(inputs, self._frozen), labels).sum()
        found = iter(torch.autograd.grad(total, self._leaves, materialize_grads=True, allow_unused=True))
        gradients = [block.shape.flatten([next(found) for _ in block.parameters]) for block in self._blocks]
        return _Learned(losses.detach(), logits.detach(), gradients)


def _learning(table: SeedTable) -> NDArray[np.bool_]:
    """``[E, S]``: where there is a seed that learns, as all do after their germination."""
    return table.owning & (table.stage != Stage.GERMINATED)


def _started(population: Population) -> Tensor:
    """Bool ``[R]``: which rows of the population's pool have begun to learn: hosts always, seeds after germination."""
    seeds = _learning(population.table)
    banks = [seeds[bank.block.owners.numpy(), kind.slot] for kind, bank in population.banks.items()]
    rows = np.concatenate([np.ones(population.size, np.bool_), *banks])
    return torch.from_numpy(rows).to(population.plan.device, non_blocking=True)


def _step(population: Population, pool: Pool, gradients: Sequence[Tensor], started: Tensor, rest: _Rest | None) -> None:
    settings = population.plan.optimizer
    gradient = flat(gradients)
    if rest is not None:
        # Not by multiplication: a resting network's gradient need not be finite.
        gradient = gradient.masked_fill(pool.spread(rest.rows), 0.0)
    if settings.clip_norm is not None:
        gradient = clip_by_network(pool, gradient, population.size, settings.clip_norm)
    optimizer_step(pool, gradient, started, settings)
