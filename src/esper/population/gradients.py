"""Gradient norms of a population's rows, by network and slot, and the health of its modules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from esper.engine.gradients import HealthTable, assess_health
from esper.lifecycle.stages import Stage
from esper.numerics.arrays import Bools, Floats
from esper.population.population import Population


def compute_row_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norms ``[R]`` of the rows' gradients, given as ``[r, P]`` per block in the order of the population's blocks."""
    hosts, *banks = gradients
    # Two formulas, which differ in the last bit: policies see these figures and were trained with just these.
    return torch.cat([hosts.square().sum(1).sqrt(), *(bank.norm(dim=1) for bank in banks)])


def split_by_slot(population: Population, rows: Floats) -> tuple[Floats, Floats]:
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


def measure_health(population: Population, hosts: Floats, seeds: Floats, learning: Bools) -> HealthTable:
    """The health ``[E, S]`` of the modules ``learning``, bool ``[E, S]``, from norms ``[T, E]`` and ``[T, E, S]``."""
    table = population.table
    return assess_health(
        hosts,
        seeds,
        host_parameters=population.host_parameters,
        seed_parameters=population.specs.costs.parameters.resident(table),
        fossils=table.stage == Stage.FOSSILIZED,
        learning=learning,
    )
