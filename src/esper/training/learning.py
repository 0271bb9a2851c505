"""Train every network of a population for one minibatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.lifecycle.stages import Stage
from esper.training.optimizers import clip_by_network, optimizer_step
from esper.training.passes import as_is, forward, shadow
from esper.training.population import Population
from esper.training.rows import RowBlock

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


def network_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each network, ``[E]``, from logits ``[E, N, classes]`` and labels ``[E, N]``."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).mean(1)


def network_accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of each network's examples that are classified correctly, ``[E]``; arguments as `network_losses`."""
    return (logits.argmax(-1) == labels).to(logits.dtype).mean(1)


def train(population: Population, batches: Iterable[Batch]) -> TrainingReport:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they count fully and all else is frozen. The
    networks' losses are added up, so no network's gradient depends on how many others there are.
    """
    population.execution.train(True)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    gradients: list[Tensor] = []
    for batch in batches:
        loss, accuracy, gradients = _train_once(population, batch)
        losses.append(loss)
        accuracies.append(accuracy)
    return TrainingReport(
        as_array(torch.stack(losses).mean(0)),
        as_array(torch.stack(accuracies).mean(0)),
        as_array(gradients[0].norm(dim=1)),
        as_array(_seed_norms(population, gradients[1:])),
    )


def as_array(tensor: Tensor) -> Floats:
    """A detached tensor as a float64 array on the CPU."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def _train_once(population: Population, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    logits = forward(population, as_is(population), batch.inputs)
    losses = network_losses(logits, batch.labels)
    objective = losses.sum()
    isolated = shadow(population)
    if isolated is not None:
        frozen = population.host.values.detach()
        objective = (
            objective + network_losses(forward(population, isolated, batch.inputs, host=frozen), batch.labels).sum()
        )
    blocks = population.blocks
    gradients = torch.autograd.grad(
        objective, [block.values for block in blocks], materialize_grads=True, allow_unused=True
    )
    _step(population, blocks, list(gradients))
    return losses.detach(), network_accuracies(logits.detach(), batch.labels), list(gradients)


def _step(population: Population, blocks: list[RowBlock], gradients: list[Tensor]) -> None:
    settings = population.plan.optimizer
    if settings.clip_norm is not None:
        gradients = clip_by_network(blocks, gradients, population.size, settings.clip_norm)
    everyone = torch.ones(population.size, dtype=torch.bool, device=population.plan.device)
    optimizer_step(blocks[0], gradients[0], everyone, settings)
    started = population.table.owning & (population.table.stage != Stage.GERMINATED)
    for ((slot, _), bank), gradient in zip(population.banks.items(), gradients[1:], strict=True):
        rows = torch.from_numpy(started[bank.block.owners.numpy(), slot]).to(gradient.device)
        optimizer_step(bank.block, gradient, rows, settings)


def _seed_norms(population: Population, gradients: list[Tensor]) -> Tensor:
    """``[E, S]`` from the banks' gradients, each ``[R, P]``."""
    norms = population.host.values.detach().new_zeros(population.size, population.table.slots)
    for ((slot, _), bank), gradient in zip(population.banks.items(), gradients, strict=True):
        norms[bank.block.owners.to(norms.device), slot] = gradient.norm(dim=1)
    return norms
