"""A population as the growth engine sees it: networks that can be measured, snapshotted and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from esper.engine.governor import skill
from esper.engine.measurements import CommittedEvaluation, Evaluation, TrainingReport
from esper.growth.promise import Promises
from esper.lifecycle.table import Stage
from esper.lifecycle.transitions import Transitions, clear_changed_measurements, remove_seeds
from esper.numerics.arrays import Bools, Ints
from esper.numerics.devices import Deferred
from esper.population.evaluation import evaluate_committed, start_evaluation
from esper.population.learning import Batch
from esper.population.parameters import FlatParameters, Piece, PopulationParameters, SeedKind, StackedParameters
from esper.population.population import Population, PopulationState, group_by_kind
from esper.population.promise import PromiseMeter
from esper.tasks.suite import Suite


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
    """Restore hosts, buffers and fossils of ``networks``, bool ``[E]``, with fresh optimizer state.

    Live seeds are pruned, and so are fossils that germinated after the snapshot: no good values of them exist.
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
    population.state = replace(
        state,
        table=table,
        measurements=clear_changed_measurements(state.measurements, changes),
        parameters=PopulationParameters.build(host, banks),
    )
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


Scored = TypeVar("Scored", Evaluation, CommittedEvaluation)


class PopulationBackend:
    """The networks of a population and the data that they are measured on: an `esper.engine.GrowthBackend`.

    ``validation`` ``[E, N, ...]`` is overwritten where data drift; promises are measured on ``newest_examples()``
    ``[E, n, ...]``, and the suite has the objective.
    """

    skills = 1
    """Number of measures of skill: one, the accuracy."""

    def __init__(
        self, population: Population, suite: Suite, validation: Batch, newest_examples: Callable[[], Batch]
    ) -> None:
        self.networks = population
        self.validation = validation
        self._suite = suite
        self._newest_examples = newest_examples
        self._meter = PromiseMeter(population)
        self._snapshots: Snapshots | None = None

    @property
    def size(self) -> int:
        """The number of networks E."""
        return self.networks.size

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss in nats and score of guessing."""
        return self._suite.chance_loss, self._suite.chance_score

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[tuple[TrainingReport, Evaluation]]:
        """Start to measure all networks; the CPU waits only once, for training, evaluation and check together."""
        evaluation = start_evaluation(self.networks, self.validation, due)
        finite = Deferred((), lambda: np.ones(self.size, np.bool_))
        if check_finite:
            # Parameters and moments: zero times a number is zero, unless the number is infinite or NaN.
            flat = self.networks.flat
            zeros = torch.stack([flat.values, *flat.moments.values()]).mul_(0).sum(0)
            finite = Deferred((flat.sum_by_network(zeros),), np.isfinite)
        measured = training.combine(evaluation).combine(finite)

        return Deferred(measured.tensors, lambda *arrays: self._make_measurement(*measured.convert(*arrays)))

    def _make_measurement(
        self, results: tuple[TrainingReport, Evaluation], finite: Bools
    ) -> tuple[TrainingReport, Evaluation]:
        training, evaluation = results
        gradients = np.isfinite(training.host_gradient) & np.isfinite(training.seed_gradient).all(axis=1)
        losses = np.isfinite(training.loss) & np.isfinite(evaluation.loss)
        # A network's skill is measured by its accuracy, whatever the objective.
        skills = skill(evaluation.accuracy, self._suite.classes)[:, None]
        if self._suite.objective == "loss":  # training has no score
            training = replace(training, accuracy=np.full(self.size, np.nan))
        return training, replace(self._score(evaluation), skill=skills, finite=losses & gradients & finite)

    def evaluate(self, due: Bools) -> Evaluation:
        """Measure all networks, and the modules in the slots ``due``, bool ``[E, S]``."""
        return self._score(start_evaluation(self.networks, self.validation, due).fetch())

    def evaluate_committed(self, data: Batch) -> CommittedEvaluation:
        """Measure the networks without their unfinished modules on ``data [E, N, ...]``."""
        return self._score(evaluate_committed(self.networks, data))

    def _score(self, evaluation: Scored) -> Scored:
        """The evaluation in terms of the objective: unchanged for accuracy, otherwise with scores from the losses."""
        by_loss = self._suite.objective == "loss"
        return evaluation.score_losses(self._suite.chance_loss) if by_loss else evaluation

    def measure_promises(self, due: Bools) -> Promises:
        """Measure the promises of blueprints in the slots ``due``, bool ``[E, S]``, on the newest training examples."""
        return self._meter.measure(self._newest_examples(), due)

    def snapshot(self, rows: Bools) -> None:
        """Save the current state of the networks ``rows``, bool ``[E]``, as their snapshot."""
        state = self.networks.state
        self._snapshots = (
            Snapshots.from_state(state) if self._snapshots is None else self._snapshots.retake(rows, state)
        )

    def restore(self, rows: Bools) -> Transitions:
        """Restore the snapshots of the networks ``rows``, bool ``[E]``; returns which seeds were pruned."""
        assert self._snapshots is not None, "the governor takes a first snapshot of all networks"
        return roll_back(self.networks, rows, self._snapshots)
