"""Snapshots of the networks of a population, and the return of some of them to their last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, remove_seeds
from esper.numerics.arrays import Bools, Ints
from esper.population.parameters import PopulationParameters, SeedBank, SeedKind, StackedParameters
from esper.population.population import Population, PopulationState, drop_pruned, forget_changed


def _rows_of(block: StackedParameters, networks: Tensor) -> Tensor:
    """The rows, int64 ``[r]``, of the networks that are True in ``networks``, bool ``[E]``."""
    return networks[block.owners].nonzero().squeeze(1)


def _copy_rows(block: StackedParameters, networks: Tensor) -> StackedParameters:
    """Copies of the rows of the networks that are True in ``networks``, bool ``[E]``, without optimizer state."""
    return replace(block, values=block.values.detach(), moments={}).select(_rows_of(block, networks))


def _restore_rows(block: StackedParameters, copies: StackedParameters | None, networks: Tensor) -> StackedParameters:
    """The block with the rows of these networks, bool ``[E]``, as in ``copies`` and with a fresh optimizer."""
    places = _rows_of(block, networks)
    if copies is None or not len(places):
        return block
    # A block has one row per network at most.
    position = copies.owners.new_full((len(networks),), -1)
    position[copies.owners] = torch.arange(len(copies))
    source = copies.select(position[block.owners[places]])
    rates = block.learning_rates[places.to(block.values.device, non_blocking=True)]
    return block.reset_rows(places, source.values, source.buffers, rates)


@dataclass(frozen=True)
class Snapshots:
    """The last good state of each of E networks: host, buffers and every seed that it had. Never written into."""

    host: StackedParameters
    seeds: Mapping[SeedKind, StackedParameters]
    births: Ints
    """``[E, S]``: the number of the seed that each slot held, counted from 1; 0 without one."""

    @classmethod
    def of(cls, state: PopulationState) -> Snapshots:
        """Copies of all networks as they are."""
        everyone = torch.ones(len(state.germinations), dtype=torch.bool)
        seeds = {kind: _copy_rows(bank.block, everyone) for kind, bank in state.parameters.banks.items()}
        return cls(_copy_rows(state.parameters.host, everyone), seeds, state.germinations * state.table.owning)

    def retake(self, rows: Bools, state: PopulationState) -> Snapshots:
        """These snapshots, taken again for the networks ``rows``, bool ``[E]``."""
        if rows.all():
            return Snapshots.from_state(state)
        if not rows.any():
            return self
        chosen, parameters = torch.from_numpy(rows), state.parameters
        kept = {kind: _copy_rows(copies, ~chosen) for kind, copies in self.seeds.items()}
        new = {kind: _copy_rows(bank.block, chosen) for kind, bank in parameters.banks.items()}
        joined = {kind: kept[kind].join(copies) if kind in kept else copies for kind, copies in new.items()}
        return Snapshots(
            _copy_rows(self.host, ~chosen).join(_copy_rows(parameters.host, chosen)),
            {kind: copies for kind, copies in (kept | joined).items() if len(copies)},
            np.where(rows[:, None], state.germinations * state.table.owning, self.births),
        )

    def knows(self, germinations: Ints) -> Bools:
        """``[E, S]``: whether the newest seed of a slot, of which ``germinations`` counts, is in the snapshot."""
        return (self.births == germinations) & (germinations > 0)

    def restore(self, rows: Bools, host: StackedParameters, banks: Mapping[SeedKind, SeedBank]) -> PopulationParameters:
        """Parameters with the networks ``rows``, bool ``[E]``, as in their snapshots and with a fresh optimizer.

        Every seed that they still have in ``banks`` must be known here.
        """
        chosen = torch.from_numpy(rows)
        restored = {
            kind: replace(bank, block=_restore_rows(bank.block, self.seeds[kind], chosen))
            if kind in self.seeds
            else bank
            for kind, bank in banks.items()
        }
        return PopulationParameters.build(_restore_rows(host, self.host, chosen), restored)


def roll_back(population: Population, rows: Bools, snapshots: Snapshots) -> Transitions:
    """Restore the networks ``rows``, bool ``[E]``, as their snapshots have them; all others are left as they are.

    Hosts, their buffers and fossils get back their values and start with a fresh optimizer; live seeds are pruned,
    and so is a fossil that germinated after the snapshot, of which no good values are known.
    """
    state = population.state
    fossils = (state.table.stage == Stage.FOSSILIZED) & snapshots.knows(state.germinations)
    table, changes = remove_seeds(state.table, rows[:, None] & ~fossils)
    parameters = snapshots.restore(rows, state.parameters.host, drop_pruned(state.parameters.banks, changes))
    evidence = forget_changed(state.evidence, changes)
    population.state = replace(state, table=table, evidence=evidence, parameters=parameters)
    return changes
