"""The governor of a population: every network for itself, all in one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, revoke
from esper.training.deferred import Floats, Pending, at_once
from esper.training.evaluation import Evaluation
from esper.training.governor.detectors import GovernorSettings, Monitor, Trouble, Vitals, skill
from esper.training.learning import TrainingReport
from esper.training.parameters import Bank, Holdings, SeedKind
from esper.training.population import Population, forget, survivors

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


Bools = NDArray[np.bool_]


def roll_back(population: Population, rows: NDArray[np.int64], snapshots: Snapshots) -> Transitions:
    """Restore the networks ``rows``, int64 ``[r]``, as their snapshots have them; all others are left as they are.

    Hosts, their buffers and fossils get back their values and start with a fresh optimizer; live seeds are pruned,
    and so is a fossil that germinated after the snapshot, of which no good values are known.
    """
    state = population.state
    afflicted = np.zeros(population.size, np.bool_)
    afflicted[rows] = True
    fossils = (state.table.stage == Stage.FOSSILIZED) & snapshots.knows(state.germinations)
    table, changes = revoke(state.table, afflicted[:, None] & ~fossils)
    banks = survivors(state.holdings.banks, changes)
    holdings = snapshots.restored(torch.from_numpy(rows), replace(state.holdings, banks=banks))
    population.state = replace(state, table=table, evidence=forget(state.evidence, changes), holdings=holdings)
    return changes


@dataclass(frozen=True)
class Intervention:
    """What a check led to."""

    trouble: NDArray[np.int8]
    """`Trouble` of each network, ``[E]``; NONE for most."""
    exhausted: Bools
    """``[E]``: those that had no rollback left; they are restored too, and should not go on."""
    transitions: Transitions
    """The seeds that were pruned."""

    @property
    def rows(self) -> Bools:
        """``[E]``: which networks were rolled back."""
        return self.trouble != Trouble.NONE


class Unwatched:
    """The governor of networks that nobody watches over."""

    def __init__(self, size: int) -> None:
        self.penalty = 0.0
        self.rollbacks: NDArray[np.int64] = np.zeros(size, np.int64)
        """``[E]``."""
        self._idle = Intervention(np.zeros(size, np.int8), np.zeros(size, np.bool_), Transitions.none())

    @property
    def rollbacks_used(self) -> NDArray[np.float64]:
        """``[E]``: the share of the allowed rollbacks that an episode has had, in [0, 1]."""
        return np.zeros(len(self.rollbacks))

    def restart(self, rows: Bools) -> None:
        """Other networks have come into ``rows``, bool ``[E]``."""

    def expect_change(self, rows: Bools) -> None:
        """What was usual for the networks ``rows``, bool ``[E]``, need not be any more: their data or seeds changed."""

    def finite(self) -> Pending[Bools]:
        """``[E]``: whether all parameters and moments of a network are finite now, as far as anybody looks."""
        return at_once(np.ones(len(self.rollbacks), np.bool_))

    def check(self, training: TrainingReport, evaluation: Evaluation, finite: Bools, running: Bools) -> Intervention:
        """Look at the networks ``running``, bool ``[E]``, and restore those in trouble; ``finite`` as found above."""
        return self._idle


class RowGovernor(Unwatched):
    """Keeps a snapshot of every network of a population, and restores those in trouble from it."""

    def __init__(self, population: Population, settings: GovernorSettings, classes: int) -> None:
        super().__init__(population.size)
        self.penalty = settings.penalty
        self._most = settings.max_rollbacks
        self._population = population
        self._classes = classes
        self._monitor = Monitor(settings, population.size)
        self._snapshots = Snapshots.of(population.state.holdings, population.germinations, population.table.owning)

    @property
    def rollbacks_used(self) -> NDArray[np.float64]:
        return np.minimum(self.rollbacks / max(self._most, 1), 1.0)

    def restart(self, rows: Bools) -> None:
        self.rollbacks = np.where(rows, 0, self.rollbacks)
        self._monitor.restart(rows)
        self._keep(rows)

    def expect_change(self, rows: Bools) -> None:
        self._monitor.restart(rows)

    def finite(self) -> Pending[Bools]:
        pool = self._population.pool
        broken = ~pool.values.isfinite()
        for moment in pool.moments.values():
            broken |= ~moment.isfinite()
        owners = pool.owners.to(broken.device, non_blocking=True)[pool.row_of_value]
        counts = pool.steps.new_zeros(self._population.size).index_add_(0, owners, broken.to(pool.steps))
        return Pending((counts,), _all_finite)

    def check(self, training: TrainingReport, evaluation: Evaluation, finite: Bools, running: Bools) -> Intervention:
        judgement = self._monitor.judge(self._vitals(training, evaluation, finite))
        self._keep(judgement.good & running)
        trouble = np.where(running, judgement.trouble, np.int8(Trouble.NONE))
        rows = trouble != Trouble.NONE
        if not rows.any():
            return self._idle
        transitions = roll_back(self._population, rows.nonzero()[0], self._snapshots)
        self.rollbacks = self.rollbacks + rows
        return Intervention(trouble, rows & (self.rollbacks > self._most), transitions)

    def _vitals(self, training: TrainingReport, evaluation: Evaluation, finite: Bools) -> Vitals:
        gradients = np.isfinite(training.host_gradient) & np.isfinite(training.seed_gradient).all(axis=1)
        losses = np.isfinite(training.loss) & np.isfinite(evaluation.loss)
        return Vitals(training.loss, skill(evaluation.accuracy, self._classes), losses & gradients & finite)

    def _keep(self, rows: Bools) -> None:
        population = self._population
        self._snapshots = self._snapshots.renewed(
            rows, population.state.holdings, population.germinations, population.table.owning
        )


def _all_finite(broken_values: Floats) -> Bools:
    return broken_values == 0


def watching(population: Population, settings: GovernorSettings | None, classes: int) -> Unwatched:
    """The governor of a population that these settings ask for."""
    return Unwatched(population.size) if settings is None else RowGovernor(population, settings, classes)
