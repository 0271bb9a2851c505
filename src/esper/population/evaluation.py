"""Measure every network on held-back data: as it is, with each of its seeds toggled, and without unfinished seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Floats
from esper.numerics.deferred import Deferred, to_arrays
from esper.population.forward import forward, select_committed
from esper.population.learning import Batch, TrainingReport, network_accuracies, network_losses
from esper.population.population import Population
from esper.population.prefix_sharing import forward_variants, toggle_slots

EVALUATION_CHUNK = 512
"""Examples per network in one forward pass; bounds memory, changes no result."""


WORST_SCORE = -1.0
"""Of a loss: accuracies are bounded as well, so that one network that diverged does not outweigh all others."""


def score_losses(losses: Floats, chance_loss: float) -> Floats:
    """The share of ``chance_loss`` that is gone, at least `WORST_SCORE`."""
    return np.fmax(1 - losses / chance_loss, WORST_SCORE)


@dataclass(frozen=True)
class Evaluation:
    """What controllers may know of their networks. Losses in nats, accuracies in [0, 1]."""

    loss: Floats
    """``[E]``."""
    accuracy: Floats
    """``[E]``."""
    accuracy_contribution: Floats
    """``[E, S]``: accuracy with the slot's seed less accuracy without it; NaN in slots without a seed, and where it is
    not known. Without it is with the seed switched off, or what a grower's evidence says."""
    loss_contribution: Floats
    """``[E, S]``: loss without the slot's seed less loss with it; NaN in the same slots."""
    fresh: Bools
    """``[E, S]``: whether contributions are of now; elsewhere they are as last known."""

    def fill_missing(self, accuracy_contribution: Floats, loss_contribution: Floats) -> Evaluation:
        """This evaluation with contributions ``[E, S]`` that were known before where none are fresh."""
        return replace(
            self,
            accuracy_contribution=np.where(self.fresh, self.accuracy_contribution, accuracy_contribution),
            loss_contribution=np.where(self.fresh, self.loss_contribution, loss_contribution),
        )

    def score_losses(self, chance_loss: float) -> Evaluation:
        """This evaluation where growth is about the loss: what is gone of ``chance_loss`` takes accuracy's place.

        A loss beyond twice that of guessing, and one that is no number, counts as twice that; contributions are at most
        as large as that range.
        """
        most = 1 - WORST_SCORE
        return replace(
            self,
            accuracy=score_losses(self.loss, chance_loss),
            accuracy_contribution=np.clip(self.loss_contribution / chance_loss, -most, most),
        )


def evaluate(population: Population, batch: Batch, due: Bools | None = None, *, shared: bool = True) -> Evaluation:
    """Evaluate a population: the result of `start_evaluation`, waited for."""
    return start_evaluation(population, batch, due, shared=shared).fetch()


@torch.inference_mode()
def start_evaluation(
    population: Population, batch: Batch, due: Bools | None = None, *, shared: bool = True
) -> Deferred[Evaluation]:
    """Evaluate all networks and, in the same pass, the leave-one-out counterfactuals of their seeds.

    A blended seed is compared with its absence, an isolated one is put in at full alpha and compared with the network
    as it is. Only slots that are ``due``, bool ``[E, S]``, are measured (None: all are); a slot costs a pass through
    what lies behind it if it is due in any network that has a seed there. ``shared`` as in `forward_variants`.
    """
    population.execution.train(False)
    due = np.ones(population.table.stage.shape, np.bool_) if due is None else due
    slots = np.flatnonzero((population.table.owning & due).any(axis=0)).tolist()
    logits = forward_variants(
        population, toggle_slots(population, slots), batch.inputs, shared=shared and population.shares_prefixes
    )
    return Deferred(measure_variants(logits, batch.labels), partial(_compare_variants, population.table, slots, due))


def measure_variants(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses in nats and accuracies, each ``[E, V]``, from logits ``[E, V, N, classes]`` and labels ``[E, N]``."""
    shape = logits.shape[:2]
    each, answers = logits.flatten(0, 1), labels.repeat_interleave(shape[1], dim=0)
    return network_losses(each, answers).view(shape), network_accuracies(each, answers).view(shape)


def _compare_variants(table: SeedTable, slots: list[int], due: Bools, losses: Floats, accuracies: Floats) -> Evaluation:
    """From losses and accuracies ``[E, V]`` of the variants."""
    by_accuracy = np.full(table.stage.shape, np.nan)
    by_loss = np.full(table.stage.shape, np.nan)
    for variant, slot in enumerate(slots, start=1):
        sign = np.where(table.blended[:, slot], 1.0, -1.0)
        by_accuracy[:, slot] = sign * (accuracies[:, 0] - accuracies[:, variant])
        by_loss[:, slot] = sign * (losses[:, variant] - losses[:, 0])
    by_accuracy[~(table.owning & due)] = np.nan
    by_loss[~(table.owning & due)] = np.nan
    return Evaluation(losses[:, 0], accuracies[:, 0], by_accuracy, by_loss, due)


def remember(population: Population, training: TrainingReport, evaluation: Evaluation) -> None:
    """Make what was measured the evidence of the next decision."""
    population.evidence = update_evidence(population.table, population.evidence, training, evaluation)


def update_evidence(table: SeedTable, before: Evidence, training: TrainingReport, evaluation: Evaluation) -> Evidence:
    """The evidence of the next decision: what was known ``before``, and what was measured now."""
    norms = training.seed_gradient
    known = np.isfinite(evaluation.loss_contribution)
    # Seeds that do not count yet are computed all the same, at alpha 0: were one not finite, the loss would not be.
    finite = np.where(evaluation.fresh, known, np.isfinite(evaluation.loss)[:, None])
    measured = table.owning & known
    stale = measured & ~evaluation.fresh
    return replace(
        before,
        probed=before.probed | (table.owning & finite),
        gradient_healthy=table.owning & np.isfinite(norms) & (norms > 0),
        contribution=np.where(measured, evaluation.accuracy_contribution, np.nan).astype(np.float32),
        contribution_age=np.where(stale, before.contribution_age + np.int16(1), np.int16(0)),
    )


@dataclass(frozen=True)
class CommittedEvaluation:
    """How the committed networks do; both ``[E]``."""

    accuracy: Floats
    loss: Floats
    """Loss in nats."""

    def score_losses(self, chance_loss: float) -> CommittedEvaluation:
        """The evaluation with losses as scores, as `Evaluation.score_losses` computes them."""
        return replace(self, accuracy=score_losses(self.loss, chance_loss))


@torch.inference_mode()
def evaluate_committed(population: Population, batch: Batch) -> CommittedEvaluation:
    """Evaluate the networks without their unfinished seeds, in chunks that bound memory and change no result."""
    population.execution.train(False)
    inputs = torch.split(batch.inputs, EVALUATION_CHUNK, 1)
    labels = torch.split(batch.labels, EVALUATION_CHUNK, 1)
    accuracies: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for some, answers in zip(inputs, labels, strict=True):
        logits = forward(population, select_committed(population), some)
        accuracies.append(network_accuracies(logits, answers) * answers.shape[1])
        losses.append(network_losses(logits, answers) * answers.shape[1])
    count = batch.labels.shape[1]
    accuracy, loss = torch.stack(accuracies).sum(0) / count, torch.stack(losses).sum(0) / count
    return CommittedEvaluation(*to_arrays(accuracy, loss))
