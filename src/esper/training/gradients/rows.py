"""The gradients of a population's rows, and what they say of the health of its seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.training.gradients.health import Floats, GradientNorms, HealthTable, judged
from esper.training.population import Population


def row_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norms ``[R]`` of the rows' gradients, given as ``[r, P]`` per block in the order of the population's blocks."""
    hosts, *banks = gradients
    # Two formulas, which differ in the last bit: policies see these figures and were trained with just these.
    return torch.cat([hosts.square().sum(1).sqrt(), *(bank.norm(dim=1) for bank in banks)])


def by_slot(population: Population, rows: Floats) -> tuple[Floats, Floats]:
    """Figures ``[T, R]`` of the population's rows as those of hosts ``[T, E]`` and of seeds ``[T, E, S]``.

    The latter are 0 in slots without a seed.
    """
    hosts, seeds = np.split(rows, [population.size], axis=1)
    slots = np.zeros((len(rows), *population.table.stage.shape))
    first = 0
    for kind, bank in population.banks.items():
        slots[:, bank.block.owners.numpy(), kind.slot] = seeds[:, first : first + len(bank)]
        first += len(bank)
    return hosts, slots


def seed_health(population: Population, hosts: Floats, seeds: Floats, learning: NDArray[np.bool_]) -> HealthTable:
    """The health ``[E, S]`` of the seeds that are ``learning``, bool ``[E, S]``, from norms ``[T, E]``, ``[T, E, S]``.

    The incumbents of a network are its host and its fossils; fossils themselves are compared with all of them.
    """
    table = population.table
    fossils = table.stage == Stage.FOSSILIZED
    incumbents = GradientNorms(
        np.sqrt(hosts**2 + np.where(fossils, seeds**2, 0.0).sum(2))[..., None],
        (population.host_parameters + population.parameters_in(fossils))[:, None],
    )
    found = judged(GradientNorms(seeds, population.roster.costs.parameters.resident(table)), incumbents)
    return HealthTable.none(*table.stage.shape).updated(learning, found)
