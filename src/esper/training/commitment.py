"""Measure what would remain if the episode ended now: hosts with their fossils."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper.training.evaluation import EVALUATION_CHUNK
from esper.training.learning import Batch, network_accuracies, network_losses
from esper.training.passes import committed, forward
from esper.training.pending import Floats, as_arrays
from esper.training.population import Population


@dataclass(frozen=True)
class Commitment:
    """How the committed networks do; both ``[E]``."""

    accuracy: Floats
    loss: Floats
    """In nats."""


@torch.inference_mode()
def committed_networks(population: Population, batch: Batch) -> Commitment:
    """Evaluate the networks without their unfinished seeds, in chunks that bound memory and change no result."""
    population.execution.train(False)
    inputs = torch.split(batch.inputs, EVALUATION_CHUNK, 1)
    labels = torch.split(batch.labels, EVALUATION_CHUNK, 1)
    accuracies: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for some, answers in zip(inputs, labels, strict=True):
        logits = forward(population, committed(population), some)
        accuracies.append(network_accuracies(logits, answers) * answers.shape[1])
        losses.append(network_losses(logits, answers) * answers.shape[1])
    count = batch.labels.shape[1]
    accuracy, loss = torch.stack(accuracies).sum(0) / count, torch.stack(losses).sum(0) / count
    return Commitment(*as_arrays(accuracy, loss))
