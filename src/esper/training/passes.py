"""Which seeds take part in which forward pass of a population, and with what alpha."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.training.bank import Bank
from esper.training.grafts import Appending, BankCall, Blended, Graft, Replicated, SlotSeeds, append
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


def as_is(population: Population) -> Participation:
    """The networks as they are: every blended seed at its alpha."""
    return Participation(population.table.blended, population.table.alpha)


def committed(population: Population) -> Participation:
    """The networks that would remain if the episode ended now: hosts and fossils."""
    return Participation(population.table.stage == Stage.FOSSILIZED, population.table.alpha)


def shadow(population: Population) -> Participation | None:
    """The networks with their isolated seeds at full alpha, in which only those seeds learn; None without any."""
    training = population.table.stage == Stage.TRAINING
    if not training.any():
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
        found = _slot_seeds(population, participation, slot, only)
        return Blended(*found) if found else None

    return _program(population, graft)


def forward(population: Population, participation: Participation, inputs: Tensor) -> Tensor:
    """Outputs ``[E, N, ...]`` on ``inputs`` ``[E, N, ...]``."""
    return prepared(population, participation)(inputs, population.host.values)


@dataclass(frozen=True)
class Toggling:
    """One variant of the networks for every slot that has seeds: its blended seeds off, its isolated ones fully on."""

    participation: Participation
    toggled_alpha: Floats
    """``[E, S]``."""
    slots: list[int]
    """The slots that get a variant, in order; variant 0 is the unchanged network."""


def toggling(population: Population) -> Toggling:
    """The leave-one-out variants of all seeds; a seed that is not blended in is put in instead of left out."""
    table = population.table
    alpha = np.where(table.blended, table.alpha, np.float32(0))
    toggled = np.where(table.owning & ~table.blended, np.float32(1), np.float32(0))
    slots = [slot for slot in range(table.slots) if table.owning[:, slot].any()]
    return Toggling(Participation(table.owning, alpha), toggled, slots)


def forward_variants(population: Population, variants: Toggling, inputs: Tensor, *, shared: bool) -> Tensor:
    """Outputs ``[E, V, N, ...]`` of all V variants on ``inputs`` ``[E, N, ...]``.

    ``shared``: layers before a slot are computed once for the variants that differ only from there on. Not possible for
    hosts with a skip connection across a slot; there, and as the reference, the whole batch is replicated.
    """
    examples = inputs.shape[1]
    count = 1 + len(variants.slots)

    def graft(slot: int, only: int | None) -> Graft | None:
        found = _slot_seeds(population, variants.participation, slot, only)
        if found is None:
            return _appended_nothing(examples) if shared and only is not None and slot in variants.slots else None
        seeds, alpha = found
        toggled = torch.from_numpy(variants.toggled_alpha[seeds.owners, slot]).to(alpha)
        if shared:
            return Appending(seeds, alpha, toggled, examples)
        return Replicated(seeds, alpha, toggled, examples, 1 + variants.slots.index(slot))

    batch = inputs if shared else inputs.repeat(1, count, *[1] * (inputs.dim() - 2))
    outputs = _program(population, graft)(batch, population.host.values)
    return outputs.view(len(outputs), count, examples, *outputs.shape[2:])


def _appended_nothing(examples: int) -> Graft:
    def graft(features: Tensor, inputs: Tensor) -> Tensor:  # noqa: ARG001 - a graft is given both
        return append(features, features[:, :examples])

    return graft


def _slot_seeds(
    population: Population, participation: Participation, slot: int, only: int | None
) -> tuple[SlotSeeds, Tensor] | None:
    """The slot's seeds in this pass and their alphas ``[r]``; of network ``only``, seen as the single one, if given."""
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
    seeds = SlotSeeds(calls, torch.from_numpy(environments).to(population.plan.device))
    return seeds, torch.from_numpy(participation.alpha[owners, slot]).to(population.host.values)


def _bank_call(
    bank: Bank, rows: NDArray[np.int64], owners: NDArray[np.int64], participation: Participation, slot: int
) -> BankCall:
    device = bank.block.values.device
    learning = None
    if participation.learning is not None:
        learning = torch.from_numpy(participation.learning[owners, slot]).to(device).unsqueeze(1)
    chosen = None if len(rows) == len(bank) else torch.from_numpy(rows).to(device)
    return BankCall(bank, owners, chosen, learning)


def _program(population: Population, graft: Callable[[int, int | None], Graft | None]) -> Program:
    execution, shape, buffers = population.execution, population.host.shape, population.host_buffers
    slots = range(population.table.slots)
    if population.strategy == "stacked":
        grafts = [graft(slot, None) for slot in slots]
        return lambda inputs, host: execution.stacked(shape.unflatten(host), buffers, inputs, grafts)
    per_network = [[graft(slot, network) for slot in slots] for network in range(population.size)]
    return lambda inputs, host: execution.looped(shape.unflatten(host), buffers, inputs, per_network)
