"""Snapshots of the networks of a population, and rollbacks to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, clear_changed_measurements, remove_seeds
from esper.numerics.arrays import Bools, Ints
from esper.population.parameters import FlatParameters, Piece, PopulationParameters, SeedKind, StackedParameters
from esper.population.population import Population, PopulationState, group_by_kind


@dataclass(frozen=True)
class Snapshots:
    """The last good state of each of E networks: host, buffers and all seeds; immutable."""

    flat: FlatParameters
    """All rows, without optimizer state: first the hosts, then the seeds of each of ``kinds``."""
    kinds: Sequence[SeedKind]
    births: Ints
    """``[E, S]``: the number of the seed that each slot held, counted from 1; 0 without one."""

    @property
    def host(self) -> StackedParameters:
        """The hosts."""
        return self.flat.blocks[0]

    @property
    def seeds(self) -> Mapping[SeedKind, StackedParameters]:
        """The seeds."""
        return dict(zip(self.kinds, self.flat.blocks[1:], strict=True))

    @classmethod
    def from_state(cls, state: PopulationState) -> Snapshots:
        """Copies of all networks in their current state."""
        parameters = state.parameters
        pieces = [[Piece(0, block, np.arange(len(rows)))] for block, rows in enumerate(parameters.flat.blocks)]
        flat = _copy_buffers(FlatParameters.gather([parameters.flat], pieces, ()))
        return cls(flat, tuple(parameters.banks), state.germinations * state.table.owning)

    def retake(self, networks: Bools, state: PopulationState) -> Snapshots:
        """New snapshots: ``networks``, bool ``[E]``, are copied again, all others stay the same."""
        if networks.all():
            return Snapshots.from_state(state)
        if not networks.any():
            return self
        # Hosts and each kind of seeds: rows of the old snapshots, then rows of the current state.
        sources = [self.flat, state.parameters.flat]
        pieces: dict[SeedKind | None, list[Piece]] = {}
        for source, kinds in enumerate((self.kinds, state.parameters.banks)):
            chosen = networks if source else ~networks
            for block, kind in enumerate((None, *kinds)):
                rows = chosen[sources[source].blocks[block].owners.numpy()].nonzero()[0]
                if len(rows):
                    pieces.setdefault(kind, []).append(Piece(source, block, rows))
        kinds = tuple(kind for kind in pieces if kind is not None)
        flat = _copy_buffers(FlatParameters.gather(sources, list(pieces.values()), ()))
        return Snapshots(flat, kinds, np.where(networks[:, None], state.germinations * state.table.owning, self.births))


def roll_back(population: Population, networks: Bools, snapshots: Snapshots) -> Transitions:
    """Restore ``networks``, bool ``[E]``, from their snapshots; all others stay unchanged.

    The values of hosts, buffers and fossils are restored, with fresh optimizer state. Live seeds are pruned, and so are
    fossils that germinated after the snapshot, because no good values of them exist.
    """
    # Only fossils that are in the snapshot stay: the newest seeds of their slots, then and now.
    state, chosen = population.state, torch.from_numpy(networks)
    contained = (snapshots.births == state.germinations) & (state.germinations > 0)
    fossils = (state.table.stage == Stage.FOSSILIZED) & contained
    table, changes = remove_seeds(state.table, networks[:, None] & ~fossils)

    # Restore the values of hosts and of these fossils.
    pruned = group_by_kind(changes, changes.after == Stage.PRUNED)
    banks = dict(state.parameters.banks)
    for kind, owners in pruned.items():
        banks[kind] = banks[kind].without(torch.from_numpy(owners))
    for kind, bank in banks.items():
        if kind in snapshots.seeds:
            banks[kind] = replace(bank, block=_restore_rows(bank.block, snapshots.seeds[kind], chosen))
    host = _restore_rows(state.parameters.host, snapshots.host, chosen)

    # One assignment, so that a failure above changes nothing.
    measurements, parameters = (
        clear_changed_measurements(state.measurements, changes),
        PopulationParameters.build(host, banks),
    )
    population.state = replace(state, table=table, measurements=measurements, parameters=parameters)
    return changes


def _copy_buffers(flat: FlatParameters) -> FlatParameters:
    """The rows with copies of their buffers, because forward passes write into the population's own."""
    copies = [{name: buffer.clone() for name, buffer in block.buffers.items()} for block in flat.blocks]
    return replace(flat, blocks=[replace(block, buffers=own) for block, own in zip(flat.blocks, copies, strict=True)])


def _restore_rows(block: StackedParameters, copies: StackedParameters, networks: Tensor) -> StackedParameters:
    """The block with the rows of ``networks``, bool ``[E]``, taken from ``copies``, with fresh optimizer state."""
    rows = networks[block.owners].nonzero().squeeze(1)
    if not len(rows):
        return block
    # A block has at most one row per network, so its owner identifies it.
    position = copies.owners.new_full((len(networks),), -1)
    position[copies.owners] = torch.arange(len(copies))
    source = copies.select(position[block.owners[rows]])
    rates = block.learning_rates[rows.to(block.values.device, non_blocking=True)]
    return block.reset_rows(rows, source.values, source.buffers, rates)
