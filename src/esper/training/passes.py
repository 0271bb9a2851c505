"""Which seeds take part in which forward pass of a population, and with what alpha."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.training.bank import Bank
from esper.training.grafts import BankCall, Blended, Estranged, Graft, SlotSeeds
from esper.training.population import Population

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Participation:
    """The seeds in a pass: which slots, with what alpha, and whose parameters learn. All arrays ``[E, S]``."""

    slots: Bools
    alpha: Floats
    learning: Bools | None = None
    """None: all that take part."""
    estranged: Bools | None = None
    """Seeds whose output counts for their own gradient alone, and not for the features; None: there are none."""


def as_is(population: Population) -> Participation:
    """The networks as they are: every blended seed at its alpha."""
    return Participation(population.table.blended, population.table.alpha)


def as_trained(population: Population) -> Participation:
    """The networks as they are, and, with isolation by a straight-through estimator, the seeds that learn by it."""
    training = population.table.stage == Stage.TRAINING
    if population.plan.rules.isolation is not Isolation.STRAIGHT_THROUGH or not training.any():
        return as_is(population)
    return Participation(population.table.blended | training, population.table.alpha, estranged=training)


def committed(population: Population) -> Participation:
    """The networks that would remain if the episode ended now: hosts and fossils."""
    return Participation(population.table.stage == Stage.FOSSILIZED, population.table.alpha)


def shadow(population: Population) -> Participation | None:
    """The networks with their isolated seeds at full alpha, in which only those seeds learn; None without any."""
    training = population.table.stage == Stage.TRAINING
    if population.plan.rules.isolation is not Isolation.SHADOW or not training.any():
        return None
    alpha = np.where(training, np.float32(1), population.table.alpha)
    return Participation(population.table.blended | training, alpha, training)


Program = Callable[[Tensor, Tensor], Tensor]
"""Outputs ``[E, N', ...]`` from inputs ``[E, N, ...]`` and the hosts' parameters ``[E, P]``.

It holds for any number of batches, until the population's next decision.
"""


def prepared(population: Population, participation: Participation) -> Program:
    """The forward pass of the networks with these seeds."""

    def graft(slot: int, only: int | None) -> Graft | None:
        seeds = slot_seeds(population, participation, slot, only)
        if seeds is None:
            return None
        alpha = torch.from_numpy(participation.alpha[seeds.owners, slot]).to(population.host.values)
        if participation.estranged is None or not participation.estranged[seeds.owners, slot].any():
            return Blended(seeds, alpha)
        apart = torch.from_numpy(participation.estranged[seeds.owners, slot]).to(alpha.device)
        return Estranged(seeds, alpha, apart)

    return program(population, graft)


def forward(population: Population, participation: Participation, inputs: Tensor) -> Tensor:
    """Outputs ``[E, N, ...]`` on ``inputs`` ``[E, N, ...]``."""
    return prepared(population, participation)(inputs, population.host.values)


def slot_seeds(
    population: Population, participation: Participation, slot: int, only: int | None = None
) -> SlotSeeds | None:
    """The slot's seeds in this pass, if any; those of network ``only``, seen as the single one, if given."""
    calls: list[BankCall] = []
    for (bank_slot, _), bank in population.banks.items():
        if bank_slot != slot:
            continue
        owners = bank.block.owners.numpy()
        rows = participation.slots[owners, slot].nonzero()[0]
        if only is not None:
            rows = rows[owners[rows] == only]
        if len(rows):
            calls.append(_bank_call(bank, rows, owners[rows], participation, slot))
    if not calls:
        return None
    owners = np.concatenate([call.owners for call in calls])
    environments = np.zeros_like(owners) if only is not None else owners
    return SlotSeeds(calls, torch.from_numpy(environments).to(population.plan.device))


def _bank_call(
    bank: Bank, rows: NDArray[np.int64], owners: NDArray[np.int64], participation: Participation, slot: int
) -> BankCall:
    device = bank.block.values.device
    learning = None
    if participation.learning is not None:
        learning = torch.from_numpy(participation.learning[owners, slot]).to(device).unsqueeze(1)
    chosen = None if len(rows) == len(bank) else torch.from_numpy(rows).to(device)
    return BankCall(bank, owners, chosen, learning)


def program(population: Population, graft: Callable[[int, int | None], Graft | None]) -> Program:
    """The forward pass with what ``graft`` has for a slot: of all networks together (None), or of one by itself."""
    execution, shape, buffers = population.execution, population.host.shape, population.host_buffers
    slots = range(population.table.slots)
    if population.strategy == "stacked":
        grafts = [graft(slot, None) for slot in slots]
        return lambda inputs, host: execution.stacked(shape.unflatten(host), buffers, inputs, grafts)
    per_network = [[graft(slot, network) for slot in slots] for network in range(population.size)]
    return lambda inputs, host: execution.looped(shape.unflatten(host), buffers, inputs, per_network)
