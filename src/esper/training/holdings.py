"""All parameters of a population with their optimizer state: the hosts' and the seeds', in one pool.

Holdings are replaced, never changed, when rows come or go; only optimizers write into them. So a population owns its
rows by one reference, which it exchanges when a change has succeeded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.actions import Blend
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions
from esper.training.bank import Bank
from esper.training.pool import Pool
from esper.training.roster import Roster, SeedKind
from esper.training.rows import RowBlock

EmptyBank = Callable[[SeedKind], Bank]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Holdings:
    """The hosts' rows, the banks of seeds, and the pool that both are views of."""

    host: RowBlock
    """One row per network."""
    host_buffers: Mapping[str, Tensor]
    """By name, each ``[E, *shape]``."""
    banks: Mapping[SeedKind, Bank]
    """None of them is empty."""
    pool: Pool
    """Of the blocks, in the order of `blocks`."""

    @classmethod
    def pooled(cls, host: RowBlock, host_buffers: Mapping[str, Tensor], banks: Mapping[SeedKind, Bank]) -> Holdings:
        """Copies of all rows, moved into one pool; banks without seeds are dropped."""
        kept = {key: bank for key, bank in banks.items() if len(bank)}
        pool = Pool.of([host, *(bank.block for bank in kept.values())])
        block, *blocks = pool.blocks
        views = {key: replace(bank, block=own) for (key, bank), own in zip(kept.items(), blocks, strict=True)}
        return cls(block, host_buffers, views, pool)

    @property
    def blocks(self) -> list[RowBlock]:
        """Every row block: the hosts' first, then the banks'."""
        return [self.host, *(bank.block for bank in self.banks.values())]

    def renewed_hosts(
        self, rows: Tensor, values: Tensor, learning_rates: Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[RowBlock, dict[str, Tensor]]:
        """The hosts' rows and buffers with those at ``rows``, int64 ``[r]``, replaced and never trained."""
        index = rows.to(self.pool.values.device, non_blocking=True)
        block = self.host.renewed(
            index, values.to(index.device, non_blocking=True), learning_rates.to(index.device, non_blocking=True)
        )
        return block, {
            name: present.index_copy(0, index, buffers[name].to(present, non_blocking=True))
            for name, present in self.host_buffers.items()
        }

    def after(self, changes: Transitions, roster: Roster, germinations: Counts, empty_bank: EmptyBank) -> Holdings:
        """The holdings without the seeds that went in ``changes``, and with those that came.

        ``germinations [E, S]`` counts the earlier seeds of each slot.
        """
        if not (changes.born | (changes.after == Stage.PRUNED)).any():
            return self
        kept = survivors(self.banks, changes)
        banks = with_newborns(kept, changes, roster, self.host.learning_rates, germinations, empty_bank)
        return Holdings.pooled(self.host, self.host_buffers, banks)


def with_newborns(
    banks: Mapping[SeedKind, Bank],
    changes: Transitions,
    roster: Roster,
    learning_rates: Tensor,
    germinations: Counts,
    empty_bank: EmptyBank,
) -> Mapping[SeedKind, Bank]:
    """The banks with the seeds that came in ``changes``.

    ``learning_rates [E]`` are the networks'; ``germinations [E, S]`` counts the earlier seeds of each slot.
    """
    grown = dict(banks)
    for key in _keys(changes, changes.born):
        owners = changes.env[changes.born & _at(changes, key)].astype(np.int64)
        seeds = [roster.new_seed(owner, key, int(germinations[owner, key.slot])) for owner in owners.tolist()]
        rates = learning_rates[torch.from_numpy(owners).to(learning_rates.device, non_blocking=True)]
        bank = grown[key] if key in grown else empty_bank(key)
        grown[key] = bank.extended(seeds, rates, torch.from_numpy(owners))
    return grown


def survivors(banks: Mapping[SeedKind, Bank], changes: Transitions) -> Mapping[SeedKind, Bank]:
    """The banks without the seeds that were pruned in ``changes``."""
    kept = dict(banks)
    died = changes.after == Stage.PRUNED
    for key in _keys(changes, died):
        leaving = changes.env[died & _at(changes, key)]
        kept[key] = kept[key].without(torch.from_numpy(leaving.astype(np.int64)))
    return kept


def _keys(changes: Transitions, chosen: NDArray[np.bool_]) -> list[SeedKind]:
    columns = (changes.slot, changes.blueprint, changes.blend)
    found = set(zip(*(column[chosen].tolist() for column in columns), strict=True))
    return [SeedKind(slot, blueprint, Blend(blend)) for slot, blueprint, blend in sorted(found)]


def _at(changes: Transitions, key: SeedKind) -> NDArray[np.bool_]:
    return (changes.slot == key.slot) & (changes.blueprint == key.blueprint) & (changes.blend == key.blend)
