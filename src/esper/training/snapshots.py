"""Copies of networks as they were when their vitals were good, to return to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.training.bank import Bank
from esper.training.holdings import Holdings
from esper.training.roster import SeedKind

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class _Seeds:
    """Copies of R seeds of one bank."""

    owners: Tensor
    """int64 ``[R]``, on the CPU."""
    values: Tensor
    """``[R, P]``."""
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, bank: Bank) -> _Seeds:
        return cls(bank.block.owners, bank.block.values, bank.buffers)

    def where(self, networks: Tensor) -> _Seeds:
        """Copies of the seeds of the networks that are True in ``networks``, bool ``[E]``."""
        index = networks[self.owners].nonzero().squeeze(1)
        on_device = index.to(self.values.device, non_blocking=True)
        buffers = {name: buffer.index_select(0, on_device) for name, buffer in self.buffers.items()}
        return _Seeds(self.owners[index], self.values.index_select(0, on_device), buffers)

    def joined(self, other: _Seeds) -> _Seeds:
        buffers = {name: torch.cat([buffer, other.buffers[name]]) for name, buffer in self.buffers.items()}
        return _Seeds(torch.cat([self.owners, other.owners]), torch.cat([self.values, other.values]), buffers)


@dataclass(frozen=True)
class Snapshots:
    """The last good state of each of E networks: host, buffers and every seed that it had. Never written into."""

    host: Tensor
    """``[E, P]``."""
    host_buffers: Mapping[str, Tensor]
    seeds: Mapping[SeedKind, _Seeds]
    births: Counts
    """``[E, S]``: the number of the seed that each slot held, counted from 1; 0 without one."""

    @classmethod
    def of(cls, holdings: Holdings, germinations: Counts, owning: NDArray[np.bool_]) -> Snapshots:
        """Copies of all networks as they are; ``germinations`` and ``owning`` are ``[E, S]``."""
        everyone = torch.ones(len(germinations), dtype=torch.bool)
        return cls(
            holdings.host.values.clone(),
            {name: buffer.clone() for name, buffer in holdings.host_buffers.items()},
            {key: _Seeds.of(bank).where(everyone) for key, bank in holdings.banks.items()},
            germinations * owning,
        )

    def renewed(
        self, rows: NDArray[np.bool_], holdings: Holdings, germinations: Counts, owning: NDArray[np.bool_]
    ) -> Snapshots:
        """These snapshots, taken again for the networks ``rows``, bool ``[E]``; other arguments as in `of`."""
        if rows.all():
            return Snapshots.of(holdings, germinations, owning)
        if not rows.any():
            return self
        chosen = torch.from_numpy(rows)
        on_device = chosen.to(self.host.device, non_blocking=True)
        kept = {key: seeds.where(~chosen) for key, seeds in self.seeds.items()}
        new = {key: _Seeds.of(bank).where(chosen) for key, bank in holdings.banks.items()}
        joined = {key: kept[key].joined(seeds) if key in kept else seeds for key, seeds in new.items()}
        return Snapshots(
            _where(on_device, holdings.host.values, self.host),
            {
                name: _where(on_device, buffer, self.host_buffers[name])
                for name, buffer in holdings.host_buffers.items()
            },
            {key: seeds for key, seeds in (kept | joined).items() if len(seeds.owners)},
            np.where(rows[:, None], germinations * owning, self.births),
        )

    def knows(self, germinations: Counts) -> NDArray[np.bool_]:
        """``[E, S]``: whether the newest seed of a slot, of which ``germinations`` counts, is in the snapshot."""
        return (self.births == germinations) & (germinations > 0)

    def restored(self, rows: Tensor, holdings: Holdings) -> Holdings:
        """The holdings with the networks ``rows``, int64 ``[r]``, as in their snapshots and with a fresh optimizer.

        Every seed that they still have must be known here.
        """
        index = rows.to(self.host.device, non_blocking=True)
        hosts = holdings.renewed_hosts(
            rows,
            self.host.index_select(0, index),
            holdings.host.learning_rates.index_select(0, index),
            {name: buffer.index_select(0, index) for name, buffer in self.host_buffers.items()},
        )
        afflicted = torch.zeros(len(self.births), dtype=torch.bool)
        afflicted[rows] = True
        banks = {key: self._restored_bank(afflicted, key, bank) for key, bank in holdings.banks.items()}
        return Holdings.pooled(*hosts, banks)

    def _restored_bank(self, afflicted: Tensor, key: SeedKind, bank: Bank) -> Bank:
        places = afflicted[bank.block.owners].nonzero().squeeze(1)
        if not len(places):
            return bank
        saved = self.seeds[key]
        sources = _positions(saved.owners, bank.block.owners[places], len(afflicted))
        device = saved.values.device
        index, source = places.to(device, non_blocking=True), sources.to(device, non_blocking=True)
        rates = bank.block.learning_rates.index_select(0, index)
        block = bank.block.renewed(index, saved.values.index_select(0, source), rates)
        buffers = {
            name: buffer.index_copy(0, index, saved.buffers[name].index_select(0, source))
            for name, buffer in bank.buffers.items()
        }
        return replace(bank, block=block, buffers=buffers)


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` in the rows that are True, ``old`` in the others; ``rows`` is bool ``[E]``."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def _positions(owners: Tensor, wanted: Tensor, networks: int) -> Tensor:
    """Where in ``owners`` each of ``wanted`` is; a bank has one seed per network at most."""
    place = owners.new_full((networks,), -1)
    place[owners] = torch.arange(len(owners))
    return place[wanted]
