"""The governor of a population: every network for itself, all in one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from esper.engine.governor import GovernorSettings, Monitor, Trouble, Vitals, skill
from esper.engine.measurements import Evaluation, TrainingReport
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, remove_seeds
from esper.numerics.arrays import Bools, Floats, Int8s, Ints
from esper.numerics.deferred import Deferred
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
            return Snapshots.of(state)
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


@dataclass(frozen=True)
class Intervention:
    """What a check led to."""

    trouble: Int8s
    """`Trouble` of each network, ``[E]``; NONE for most."""
    exhausted: Bools
    """``[E]``: those that had no rollback left; they are restored too, and should not go on."""
    transitions: Transitions
    """The seeds that were pruned."""

    @property
    def rows(self) -> Bools:
        """``[E]``: which networks were rolled back."""
        return self.trouble != Trouble.NONE


class PopulationGovernor:
    """Keeps a snapshot of every network of a population, and restores those in trouble from it.

    Without settings it watches over nobody.
    """

    def __init__(self, population: Population, settings: GovernorSettings | None, classes: int) -> None:
        size = population.size
        self.penalty = 0.0 if settings is None else settings.penalty
        self.rollbacks: Ints = np.zeros(size, np.int64)
        """``[E]``."""
        self._most = 0 if settings is None else settings.max_rollbacks
        self._population = population
        self._classes = classes
        self._idle = Intervention(np.zeros(size, np.int8), np.zeros(size, np.bool_), Transitions.none())
        self._monitor = None if settings is None else Monitor(settings, size)
        if self._monitor is not None:
            self._snapshots = Snapshots.of(population.state)

    @property
    def rollbacks_used(self) -> Floats:
        """``[E]``: the share of the allowed rollbacks that an episode has had, in [0, 1]."""
        return np.minimum(self.rollbacks / max(self._most, 1), 1.0)

    def restart(self, rows: Bools) -> None:
        """Other networks have come into ``rows``, bool ``[E]``."""
        self.rollbacks = np.where(rows, 0, self.rollbacks)
        if self._monitor is not None:
            self._monitor.restart(rows)
            self._keep(rows)

    def expect_change(self, rows: Bools) -> None:
        """What was usual for the networks ``rows``, bool ``[E]``, need not be any more: their data or seeds changed."""
        if self._monitor is not None:
            self._monitor.restart(rows)

    def finite(self) -> Deferred[Bools]:
        """``[E]``: whether all parameters and moments of a network are finite now, as far as anybody looks."""
        if self._monitor is None:
            return Deferred((), lambda: np.ones(self._population.size, np.bool_))
        flat = self._population.flat
        broken = ~flat.values.isfinite()
        for moment in flat.moments.values():
            broken |= ~moment.isfinite()
        owners = flat.owners.to(broken.device, non_blocking=True)[flat.row_of_value]
        counts = flat.steps.new_zeros(self._population.size).index_add_(0, owners, broken.to(flat.steps))
        return Deferred((counts,), _all_finite)

    def check(self, training: TrainingReport, evaluation: Evaluation, finite: Bools, running: Bools) -> Intervention:
        """Look at the networks ``running``, bool ``[E]``, and restore those in trouble; ``finite`` as found above."""
        if self._monitor is None:
            return self._idle
        judgement = self._monitor.judge(self._vitals(training, evaluation, finite))
        self._keep(judgement.good & running)
        trouble = np.where(running, judgement.trouble, np.int8(Trouble.NONE))
        rows = trouble != Trouble.NONE
        if not rows.any():
            return self._idle
        transitions = roll_back(self._population, rows, self._snapshots)
        self.rollbacks = self.rollbacks + rows
        return Intervention(trouble, rows & (self.rollbacks > self._most), transitions)

    def _vitals(self, training: TrainingReport, evaluation: Evaluation, finite: Bools) -> Vitals:
        gradients = np.isfinite(training.host_gradient) & np.isfinite(training.seed_gradient).all(axis=1)
        losses = np.isfinite(training.loss) & np.isfinite(evaluation.loss)
        return Vitals(training.loss, skill(evaluation.accuracy, self._classes), losses & gradients & finite)

    def _keep(self, rows: Bools) -> None:
        self._snapshots = self._snapshots.retake(rows, self._population.state)


def _all_finite(broken_values: Floats) -> Bools:
    return broken_values == 0
