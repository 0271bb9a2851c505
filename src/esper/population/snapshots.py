"""Snapshots of the networks of a population, and the return of some of them to their last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, clear_changed_evidence, remove_seeds
from esper.numerics.arrays import Bools, Ints
from esper.population.parameters import PopulationParameters, SeedKind, StackedParameters
from esper.population.population import Population, PopulationState, remove_pruned_seeds


@dataclass(frozen=True)
class Snapshots:
    """The last good state of each of E networks: host, buffers and every seed that it had. Never written into."""

    host: StackedParameters
    seeds: Mapping[SeedKind, StackedParameters]
    births: Ints
    """``[E, S]``: the number of the seed that each slot held, counted from 1; 0 without one."""

    @classmethod
    def from_state(cls, state: PopulationState) -> Snapshots:
        """Copies of all networks as they are."""
        all_networks = torch.ones(len(state.germinations), dtype=torch.bool)
        seeds = {kind: _copy_rows(bank.block, all_networks) for kind, bank in state.parameters.banks.items()}
        return cls(_copy_rows(state.parameters.host, all_networks), seeds, state.germinations * state.table.owning)

    def retake(self, networks: Bools, state: PopulationState) -> Snapshots:
        """These snapshots, taken again for ``networks``, bool ``[E]``."""
        if networks.all():
            return Snapshots.from_state(state)
        if not networks.any():
            return self
        chosen, parameters = torch.from_numpy(networks), state.parameters
        seeds = {kind: _copy_rows(copies, ~chosen) for kind, copies in self.seeds.items()}
        for kind, bank in parameters.banks.items():
            copies = _copy_rows(bank.block, chosen)
            seeds[kind] = seeds[kind].join(copies) if kind in seeds else copies
        return Snapshots(
            _copy_rows(self.host, ~chosen).join(_copy_rows(parameters.host, chosen)),
            {kind: copies for kind, copies in seeds.items() if len(copies)},
            np.where(networks[:, None], state.germinations * state.table.owning, self.births),
        )

    def contains_seeds(self, germinations: Ints) -> Bools:
        """``[E, S]``: whether the snapshot holds the newest seed of a slot, the last that ``germinations`` counts."""
        return (self.births == germinations) & (germinations > 0)


def roll_back(population: Population, networks: Bools, snapshots: Snapshots) -> Transitions:
    """Restore ``networks``, bool ``[E]``, as their snapshots have them; all others are left as they are.

    Hosts, their buffers and fossils get back their values and start with a fresh optimizer; live seeds are pruned,
    and so is a fossil that germinated after the snapshot, of which no good values are known.
    """
    # Only fossils that the snapshot holds stay.
    state, chosen = population.state, torch.from_numpy(networks)
    fossils = (state.table.stage == Stage.FOSSILIZED) & snapshots.contains_seeds(state.germinations)
    table, changes = remove_seeds(state.table, networks[:, None] & ~fossils)

    # Hosts and these fossils get back their values.
    banks = dict(remove_pruned_seeds(state.parameters.banks, changes))
    for kind, bank in banks.items():
        if kind in snapshots.seeds:
            banks[kind] = replace(bank, block=_restore_rows(bank.block, snapshots.seeds[kind], chosen))
    host = _restore_rows(state.parameters.host, snapshots.host, chosen)

    # One assignment, so that a failure above leaves everything as it was.
    evidence, parameters = clear_changed_evidence(state.evidence, changes), PopulationParameters.build(host, banks)
    population.state = replace(state, table=table, evidence=evidence, parameters=parameters)
    return changes


def _copy_rows(block: StackedParameters, networks: Tensor) -> StackedParameters:
    """Copies of the rows of ``networks``, bool ``[E]``, without optimizer state."""
    rows = networks[block.owners].nonzero().squeeze(1)
    return replace(block, values=block.values.detach(), moments={}).select(rows)


def _restore_rows(block: StackedParameters, copies: StackedParameters, networks: Tensor) -> StackedParameters:
    """The block with the rows of ``networks``, bool ``[E]``, as in ``copies`` and with a fresh optimizer."""
    rows = networks[block.owners].nonzero().squeeze(1)
    if not len(rows):
        return block
    # A block has at most one row per network, so its owner identifies it.
    position = copies.owners.new_full((len(networks),), -1)
    position[copies.owners] = torch.arange(len(copies))
    source = copies.select(position[block.owners[rows]])
    rates = block.learning_rates[rows.to(block.values.device, non_blocking=True)]
    return block.reset_rows(rows, source.values, source.buffers, rates)
