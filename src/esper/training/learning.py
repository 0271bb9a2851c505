"""Train every network of a population for one minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from esper.training.passes import as_trained, prepared, shadow
from esper.training.pool import Pool, flat
from esper.training.population import Population

Floats = NDArray[np.float64]


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
    """Fraction of each network's examples that are classified correctly, ``[E]``; arguments as `network_losses`."""
    return (logits.argmax(-1) == labels).to(logits.dtype).mean(1)


def train(population: Population, batches: Iterable[Batch], resting: NDArray[np.bool_] | None = None) -> TrainingReport:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they count fully and all else is frozen. The
    networks' losses are added up, so no network's gradient depends on how many others there are. The networks
    ``resting``, bool ``[E]``, keep all their values and buffers (None: all learn).
    """
    population.execution.train(True)
    rest = _Rest(population, resting) if resting is not None and resting.any() else None
    pool = population.pool
    started = _started(population)
    if rest is not None:
        started &= ~rest.rows
    objective = _objective(population)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        loss, accuracy, total = objective(batch)
        gradients = torch.autograd.grad(
            total, [block.values for block in pool.blocks], materialize_grads=True, allow_unused=True
        )
        _step(population, pool, gradients, started, rest)
        losses.append(loss)
        accuracies.append(accuracy)
        norms.append(row_norms(gradients))
    if rest is not None:
        rest.restore_buffers(population)
    hosts, seeds = by_slot(population, as_array(torch.stack(norms)))
    learning = _learning(population.table) & (True if resting is None else ~resting[:, None])
    return TrainingReport(
        as_array(torch.stack(losses).mean(0)),
        as_array(torch.stack(accuracies).mean(0)),
        hosts[-1],
        seeds[-1],
        seed_health(population, hosts, seeds, learning),
    )


def as_array(tensor: Tensor) -> Floats:
    """A detached tensor as a float64 array on the CPU."""
    return tensor.detach().to("cpu", torch.float64).numpy()


class _Rest:
    """Networks that must not change while the others learn."""

    def __init__(self, population: Population, resting: NDArray[np.bool_]) -> None:
        networks = torch.from_numpy(resting)
        self.rows = networks[population.pool.owners].to(population.plan.device)
        """Rows of the pool that belong to them, bool ``[R]``."""
        self._networks = networks.to(population.plan.device)
        self._buffers = {name: buffer[self._networks] for name, buffer in population.host_buffers.items()}

    def restore_buffers(self, population: Population) -> None:
        for name, buffer in population.host_buffers.items():
            buffer[self._networks] = self._buffers[name]


def _objective(population: Population) -> Callable[[Batch], tuple[Tensor, Tensor, Tensor]]:
    """What a minibatch says: the networks' losses and accuracies, both ``[E]``, and the total to minimise."""
    whole = prepared(population, as_trained(population))
    isolated = shadow(population)
    alone = None if isolated is None else prepared(population, isolated)
    host = population.host.values

    def objective(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        logits = whole(batch.inputs, host)
        losses = network_losses(logits, batch.labels)
        total = losses.sum()
        if alone is not None:
            total = total + network_losses(alone(batch.inputs, host.detach()), batch.labels).sum()
        return losses.detach(), network_accuracies(logits.detach(), batch.labels), total

    return objective


def _learning(table: SeedTable) -> NDArray[np.bool_]:
    """``[E, S]``: where there is a seed that learns, as all do after their germination."""
    return table.owning & (table.stage != Stage.GERMINATED)


def _started(population: Population) -> Tensor:
    """Bool ``[R]``: which rows of the population's pool have begun to learn: hosts always, seeds after germination."""
    seeds = _learning(population.table)
    banks = [seeds[bank.block.owners.numpy(), slot] for (slot, _), bank in population.banks.items()]
    rows = np.concatenate([np.ones(population.size, np.bool_), *banks])
    return torch.from_numpy(rows).to(population.plan.device)


def _step(population: Population, pool: Pool, gradients: Sequence[Tensor], started: Tensor, rest: _Rest | None) -> None:
    settings = population.plan.optimizer
    gradient = flat(gradients)
    if rest is not None:
        # Not by multiplication: a resting network's gradient need not be finite.
        gradient = gradient.masked_fill(pool.spread(rest.rows), 0.0)
    if settings.clip_norm is not None:
        gradient = clip_by_network(pool, gradient, population.size, settings.clip_norm)
    optimizer_step(pool, gradient, started, settings)
