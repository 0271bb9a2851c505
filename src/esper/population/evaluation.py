"""Measure every network on held-out data: as it is, with each of its seeds toggled, and without unfinished seeds."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from esper.engine.measurements import CommittedEvaluation, Evaluation
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats
from esper.numerics.deferred import Deferred, to_arrays
from esper.population.forward import forward, select_committed
from esper.population.learning import (
    Batch,
    compute_accuracies,
    compute_label_hits,
    compute_label_losses,
    compute_losses,
)
from esper.population.population import Population
from esper.population.prefix_sharing import forward_variants, toggle_slots

EVALUATION_CHUNK = 512
"""Number of examples per network in one forward pass; it limits memory and does not change results."""


def evaluate(population: Population, batch: Batch, due: Bools | None = None) -> Evaluation:
    """Evaluate a population; as `start_evaluation`, but waits for the result."""
    return start_evaluation(population, batch, due).fetch()


@torch.inference_mode()
def start_evaluation(population: Population, batch: Batch, due: Bools | None = None) -> Deferred[Evaluation]:
    """Evaluate all networks and, in the same pass, the leave-one-out counterfactuals of their seeds.

    A network with a blended seed is compared with the same network without it. An isolated seed is added at full alpha,
    and the result is compared with the network as it is. Only the slots ``due``, bool ``[E, S]``, are measured (None:
    all slots). A slot costs a pass through the layers after it if it is due in any network that has a seed there.
    """
    population.execution.train(False)
    due = np.ones(population.table.stage.shape, np.bool_) if due is None else due
    slots = np.flatnonzero((population.table.owning & due).any(axis=0)).tolist()
    logits = forward_variants(population, toggle_slots(population, slots), batch.inputs)
    convert = partial(_compute_contributions, population.table, slots, due)
    return Deferred(score_variants(logits, batch.labels), convert)


def score_variants(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Mean losses in nats, accuracies, and the standard errors of their differences from the first variant's.

    Each is ``[E, V]``; the errors, first those of losses, are NaN for a single example.
    Logits are ``[E, V, N, classes]`` and labels ``[E, N]``, or ``[E, V, N, T, classes]`` and ``[E, N, T]``. All
    variants are measured on the same N examples, so the standard error of a difference of means is that of the mean of
    N differences. A sequence counts as one example.
    """
    shape, count = logits.shape[:2], labels.shape[1]
    logits, labels = logits.flatten(0, 1), labels.repeat_interleave(shape[1], dim=0)

    # Both figures at once, which halves the number of operations.
    figures = torch.stack((compute_label_losses(logits, labels), compute_label_hits(logits, labels)))
    means = figures.mean(2).view(2, *shape)
    by_example = figures.view(2, *shape, count, -1).mean(4)
    differences = by_example - by_example[:, :, :1]
    # Computed by hand, because torch warns about the deviation of a single example.
    squares = (differences - differences.mean(3, keepdim=True)).square().sum(3)
    errors = (squares / (count - 1) / count).sqrt()
    return [*means, *errors]


def _compute_contributions(
    table: SeedTable,
    slots: list[int],
    due: Bools,
    losses: Floats,
    accuracies: Floats,
    loss_errors: Floats,
    accuracy_errors: Floats,
) -> Evaluation:
    """The evaluation from the figures `score_variants` of the networks and of the variant for each slot."""
    by_accuracy, by_loss, accuracy_error, loss_error = np.full((4, *table.stage.shape), np.nan)
    for variant, slot in enumerate(slots, start=1):
        # The variant lacks a blended seed, and has an isolated one.
        sign = np.where(table.blended[:, slot], 1.0, -1.0)
        by_accuracy[:, slot] = sign * (accuracies[:, 0] - accuracies[:, variant])
        by_loss[:, slot] = sign * (losses[:, variant] - losses[:, 0])
        accuracy_error[:, slot], loss_error[:, slot] = accuracy_errors[:, variant], loss_errors[:, variant]
    for figures in (by_accuracy, by_loss, accuracy_error, loss_error):
        figures[~(table.owning & due)] = np.nan
    return Evaluation(losses[:, 0], accuracies[:, 0], by_accuracy, by_loss, accuracy_error, loss_error, due)


@torch.inference_mode()
def evaluate_committed(population: Population, batch: Batch) -> CommittedEvaluation:
    """Evaluate the networks without their unfinished seeds, in chunks that limit memory and do not change results."""
    population.execution.train(False)
    committed, count = select_committed(population), batch.labels.shape[1]
    chunk = min(EVALUATION_CHUNK, population.config.examples_per_pass or EVALUATION_CHUNK)
    parts = torch.split(batch.inputs, chunk, 1), torch.split(batch.labels, chunk, 1)
    accuracies: list[Tensor] = []
    losses: list[Tensor] = []
    for inputs, labels in zip(*parts, strict=True):
        logits = forward(population, committed, inputs)
        accuracies.append(compute_accuracies(logits, labels) * labels.shape[1])
        losses.append(compute_losses(logits, labels) * labels.shape[1])
    accuracy, loss = torch.stack(accuracies).sum(0) / count, torch.stack(losses).sum(0) / count
    return CommittedEvaluation(*to_arrays(accuracy, loss))
