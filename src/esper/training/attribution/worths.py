"""What the networks of a population are worth with some of their seeds switched off."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from esper.training.attribution.game import Bools, Floats
from esper.training.evaluation import EVALUATION_CHUNK, variant_measures
from esper.training.learning import Batch
from esper.training.passes import Participation
from esper.training.pending import as_arrays
from esper.training.population import Population
from esper.training.variants import Variants, forward_variants

VARIANTS_AT_ONCE = 64
"""Variants in one forward pass, which has `EVALUATION_CHUNK` examples of all of them together. Both bound memory and
change no result."""


@torch.inference_mode()
def worths_without(
    population: Population, participation: Participation, batch: Batch, off: Bools, *, shared: bool
) -> Floats:
    """``[2, E, V]``: accuracy, and minus the mean loss in nats, of V variants of each network.

    ``off`` ``[V, E, S]`` says whose seeds are switched off in which variant; ``shared`` as in `forward_variants`.
    """
    population.execution.train(False)
    off = off & participation.slots
    variants, networks, slots = off.shape
    # Sorted from the first slot to the last, so that neighbours have the most in common.
    by_slot = off.transpose(0, 2, 1).reshape(variants, -1)
    distinct, place = np.unique(by_slot, axis=0, return_inverse=True)
    distinct = distinct.reshape(-1, slots, networks).transpose(0, 2, 1)
    groups = np.split(distinct, range(VARIANTS_AT_ONCE, len(distinct), VARIANTS_AT_ONCE))
    measured = [_measured(population, participation, batch, group, shared=shared) for group in groups]
    found = np.concatenate(measured, axis=-1)[..., place.reshape(-1)]
    return np.stack([found[:, network, _first_alike(off[:, network])] for network in range(networks)], axis=1)


def _first_alike(off: Bools) -> NDArray[np.intp]:
    """``[V]``: the first variant like each, of one network's ``[V, S]``, so that what is alike is worth just the same.

    Elsewhere in a batch, the same sums may be rounded another way.
    """
    _, first, place = np.unique(off, axis=0, return_index=True, return_inverse=True)
    return first[place.reshape(-1)]


def _measured(
    population: Population, participation: Participation, batch: Batch, off: Bools, *, shared: bool
) -> Floats:
    """``[2, E, V]`` of one group of different variants."""
    variants = Variants(participation, np.zeros_like(participation.alpha), off)
    chunk = max(EVALUATION_CHUNK // len(off), 1)
    total = torch.zeros(2, population.size, len(off), dtype=torch.float64, device=batch.labels.device)
    for inputs, labels in zip(torch.split(batch.inputs, chunk, 1), torch.split(batch.labels, chunk, 1), strict=True):
        logits = forward_variants(population, variants, inputs, shared=shared)
        losses, accuracies = variant_measures(logits, labels)
        total += torch.stack([accuracies, -losses]).to(total) * labels.shape[1]
    (means,) = as_arrays(total / batch.labels.shape[1])
    return means
