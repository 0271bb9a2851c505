"""Measure every network on held-back data: as it is, and with each of its seeds toggled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.table import Evidence, SeedTable
from esper.training.learning import Batch, TrainingReport, as_array, network_accuracies, network_losses
from esper.training.population import Population
from esper.training.variants import forward_variants, toggling

Floats = NDArray[np.float64]

EVALUATION_CHUNK = 512
"""Examples per network in one forward pass; bounds memory, changes no result."""


@dataclass(frozen=True)
class Evaluation:
    """What controllers may know of their networks. Losses in nats, accuracies in [0, 1]."""

    loss: Floats
    """``[E]``."""
    accuracy: Floats
    """``[E]``."""
    accuracy_contribution: Floats
    """``[E, S]``: accuracy with the slot's seed less accuracy without it; NaN in slots without a seed."""
    loss_contribution: Floats
    """``[E, S]``: loss without the slot's seed less loss with it; NaN in slots without a seed."""

    def updated(self, rows: NDArray[np.bool_], newer: Evaluation) -> Evaluation:
        """This evaluation with the networks ``rows``, bool ``[E]``, as in a newer one."""
        return Evaluation(
            np.where(rows, newer.loss, self.loss),
            np.where(rows, newer.accuracy, self.accuracy),
            np.where(rows[:, None], newer.accuracy_contribution, self.accuracy_contribution),
            np.where(rows[:, None], newer.loss_contribution, self.loss_contribution),
        )


@torch.inference_mode()
def evaluate(population: Population, batch: Batch, *, shared: bool = True) -> Evaluation:
    """Evaluate all networks and, in the same pass, every seed's leave-one-out counterfactual.

    A blended seed is compared with its absence, an isolated one is put in at full alpha and compared with the network
    as it is. ``shared`` as in `forward_variants`.
    """
    population.execution.train(False)
    slots = np.flatnonzero(population.table.owning.any(axis=0)).tolist()
    logits = forward_variants(
        population, toggling(population, slots), batch.inputs, shared=shared and population.shares_prefixes
    )
    losses, accuracies = variant_measures(logits, batch.labels)
    return _evaluation(population, slots, as_array(losses), as_array(accuracies))


def variant_measures(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses in nats and accuracies, each ``[E, V]``, from logits ``[E, V, N, classes]`` and labels ``[E, N]``."""
    shape = logits.shape[:2]
    each, answers = logits.flatten(0, 1), labels.repeat_interleave(shape[1], dim=0)
    return network_losses(each, answers).view(shape), network_accuracies(each, answers).view(shape)


def _evaluation(population: Population, slots: list[int], losses: Floats, accuracies: Floats) -> Evaluation:
    """From losses and accuracies ``[E, V]`` of the variants."""
    table = population.table
    by_accuracy = np.full(table.stage.shape, np.nan)
    by_loss = np.full(table.stage.shape, np.nan)
    for variant, slot in enumerate(slots, start=1):
        sign = np.where(table.blended[:, slot], 1.0, -1.0)
        by_accuracy[:, slot] = sign * (accuracies[:, 0] - accuracies[:, variant])
        by_loss[:, slot] = sign * (losses[:, variant] - losses[:, 0])
    by_accuracy[~table.owning] = np.nan
    by_loss[~table.owning] = np.nan
    return Evaluation(losses[:, 0], accuracies[:, 0], by_accuracy, by_loss)


def remember(population: Population, training: TrainingReport, evaluation: Evaluation) -> None:
    """Make what was measured the evidence of the next decision."""
    population.evidence = remembered(population.table, population.evidence, training, evaluation)


def remembered(table: SeedTable, before: Evidence, training: TrainingReport, evaluation: Evaluation) -> Evidence:
    """The evidence of the next decision: what was known ``before``, and what was measured now."""
    norms = training.seed_gradient
    measured = table.owning & np.isfinite(evaluation.loss_contribution)
    return replace(
        before,
        probed=before.probed | measured,
        gradient_healthy=table.owning & np.isfinite(norms) & (norms > 0),
        contribution=np.where(measured, evaluation.accuracy_contribution, np.nan).astype(np.float32),
        contribution_age=np.zeros_like(before.contribution_age),
    )
