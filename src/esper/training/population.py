"""A population: E networks of one architecture, their seeds, and the lifecycle table that says what is what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.growth import blending
from esper.growth.blending import joined
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.site import Layout, Site
from esper.lifecycle.actions import Blend
from esper.lifecycle.masks import ActionMasks, legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import Step, Transitions, step, with_fossils
from esper.tasks.optimizer import OptimizerSettings
from esper.training.budget import Budget, Cost, Costs, affordable, budget_left
from esper.training.execution import Execution
from esper.training.optimizers import MOMENT_NAMES
from esper.training.parameters import (
    Bank,
    Holdings,
    Pool,
    RowBlock,
    RowShape,
    SeedKind,
    SeedModule,
    pad,
)

Fossils = tuple[SeedKind, ...]
"""Finished seeds of one network."""


class Network(NamedTuple):
    """What one network of a population starts from."""

    host: nn.Module
    """Of the template's architecture, at most as wide, freshly initialised."""
    widths: tuple[int, ...]
    """Its live channels at each slot."""
    learning_rate: float
    seed: int
    """All that is random about its seeds follows from this."""
    fossils: Fossils = ()
    """What it has from the first step on, fresh and at alpha 1; nothing, if it is to grow by itself."""


@dataclass(frozen=True)
class Roster:
    """E networks with K blueprints on offer at each of their S slots."""

    networks: Sequence[Network]
    sites: Sequence[Site]
    """At full width, one per slot."""
    kinds: Sequence[type[Blueprint]]
    bytes_per_parameter: int
    """Of a value, its gradient and its optimizer state."""

    @property
    def widths(self) -> NDArray[np.int64]:
        """Live channels at each slot, ``[E, S]``."""
        return self._given[0]

    @property
    def learning_rates(self) -> NDArray[np.float64]:
        """``[E]``."""
        return self._given[1]

    @cached_property
    def _given(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        widths = np.array([network.widths for network in self.networks])
        return widths, np.array([network.learning_rate for network in self.networks])

    @cached_property
    def host_parameters(self) -> NDArray[np.int64]:
        """Parameters before any growth, ``[E]``."""
        return np.array([sum(part.numel() for part in network.host.parameters()) for network in self.networks])

    @property
    def costs(self) -> Costs:
        """What seeds would cost."""
        return self._catalogue[0]

    @property
    def compatible(self) -> NDArray[np.bool_]:
        """Whether a blueprint serves a slot, ``[E, S, K]``."""
        return self._catalogue[1]

    @cached_property
    def _catalogue(self) -> tuple[Costs, NDArray[np.bool_]]:
        places = [list(enumerate(network.widths)) for network in self.networks]
        # Slots of equal widths cost the same.
        distinct = sorted({place for own in places for place in own})
        number = {place: index for index, place in enumerate(distinct)}
        known = [_prices(self.kinds, self.sites[slot].narrowed(width)) for slot, width in distinct]
        chosen = np.array([[number[place] for place in own] for own in places])  # [E, S]
        parameters, flops, serves, blend_parameters, blend_flops = (
            np.stack(column)[chosen] for column in zip(*known, strict=True)
        )
        added = Cost(parameters, blend_parameters)
        return Costs(added, Cost(flops, blend_flops), added.scaled(self.bytes_per_parameter)), serves

    def replaced(self, rows: Sequence[int], networks: Sequence[Network]) -> Roster:
        """The roster with other networks at ``rows``."""
        changed = list(self.networks)
        for row, network in zip(rows, networks, strict=True):
            changed[row] = network
        return replace(self, networks=changed)

    def new_seed(self, network: int, kind: SeedKind, tries: int) -> SeedModule:
        """A fresh seed; ``tries`` counts the earlier seeds of that slot.

        Whatever the blueprint's constructor raises passes through.
        """
        owner = self.networks[network]
        site = self.sites[kind.slot].narrowed(owner.widths[kind.slot])
        blueprint = self.kinds[kind.blueprint](site, seed_generator(owner.seed, kind.slot, tries))
        return blending.joined(blueprint, site, kind.blend)


class _Prices(NamedTuple):
    """What there is for one slot."""

    parameters: NDArray[np.int64]
    """Of each blueprint, ``[K]``; 0 where it does not serve."""
    flops: NDArray[np.int64]
    serves: NDArray[np.bool_]
    blend_parameters: NDArray[np.int64]
    """Of each `Blend`, ``[3]``."""
    blend_flops: NDArray[np.int64]


def _prices(kinds: Sequence[type[Blueprint]], site: Site) -> _Prices:
    serves = [kind.serves(site) for kind in kinds]
    return _Prices(
        np.array([kind.parameters_at(site) if fits else 0 for kind, fits in zip(kinds, serves, strict=True)], np.int64),
        np.array([kind.flops_at(site) if fits else 0 for kind, fits in zip(kinds, serves, strict=True)], np.int64),
        np.array(serves, np.bool_),
        np.array([blending.parameters_at(blend, site) for blend in Blend]),
        np.array([blending.flops_at(blend, site) for blend in Blend]),
    )


def seed_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a seed's first weights: a function of its network, slot and number of earlier seeds there."""
    word = np.random.SeedSequence((network_seed, slot, tries)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))


Strategy = Literal["stacked", "looped"]
"""How the networks are run: as one program, or one after the other. The results are the same."""
StrategyChoice = Strategy | Literal["auto"]
"""``auto``: whichever is faster here, found out by timing both once."""
STRATEGIES: tuple[Strategy, ...] = ("stacked", "looped")


@dataclass(frozen=True)
class PopulationPlan:
    """The architecture of a population, what may grow on it, and how it is trained."""

    template: nn.Module
    """The host at full width; only its architecture matters."""
    slots: tuple[str, ...]
    """Submodules that get a slot, first to last."""
    blueprints: tuple[str, ...]
    """Registry names on offer; a blueprint's index in actions and tables is its index here."""
    example_input: Tensor
    """``[B, ...]``, for the probe forward."""
    optimizer: OptimizerSettings = OptimizerSettings()
    rules: Rules = Rules()
    strategy: Strategy = "stacked"
    networks_per_pass: int | None = None
    """The most networks that are computed at once, so that what a pass keeps fits into memory; None: all of them. The
    results are the same."""
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    budget: Budget = Budget()


Actions = NDArray[np.int64]


@dataclass(frozen=True)
class PopulationState:
    """All of a population that changes. Optimizers write into the holdings; everything else is replaced."""

    roster: Roster
    table: SeedTable
    evidence: Evidence
    germinations: NDArray[np.int64]
    """Seeds that each slot has had, ``[E, S]``."""
    holdings: Holdings


class Population:
    """E networks, computed as one program. Networks never influence one another.

    Raises:
        SlotError: a slot's name does not fit the template.
        UnknownBlueprintError: a blueprint is not registered.
    """

    def __init__(self, plan: PopulationPlan, networks: Sequence[Network]) -> None:
        template = plan.template.to(device=plan.device, dtype=plan.dtype)
        example = plan.example_input.to(device=plan.device, dtype=plan.dtype)
        self.plan = plan
        self.execution = Execution(template, plan.slots, example)
        self.shares_prefixes = self.execution.shares_prefixes(example)
        self.size = len(networks)
        self.strategy: Strategy = plan.strategy
        self._moment_names = MOMENT_NAMES[plan.optimizer.name]
        self._host_shape = RowShape.of(template)
        self._buffer_shapes = {name: buffer.shape for name, buffer in template.named_buffers()}
        self._bank_templates: dict[SeedKind, Bank] = {}
        self.state = self._unset(networks)
        self.replace(np.arange(self.size), networks)

    def _unset(self, networks: Sequence[Network]) -> PopulationState:
        """Rows of zeros for all networks."""
        plan, shape = self.plan, (self.size, len(self.plan.slots))
        kinds = [get(name) for name in plan.blueprints]
        # A value, its gradient and its moments.
        bytes_per_parameter = plan.dtype.itemsize * (2 + len(self._moment_names))
        block = RowBlock.empty(self._host_shape, self._moment_names, plan.dtype, plan.device)
        zeros = torch.zeros(self.size, self._host_shape.size)
        host = block.extended(zeros, torch.zeros(self.size), torch.arange(self.size))
        buffers = {
            name: torch.zeros(self.size, *shape, dtype=plan.dtype, device=plan.device)
            for name, shape in self._buffer_shapes.items()
        }
        return PopulationState(
            Roster(list(networks), self.execution.sites, kinds, bytes_per_parameter),
            SeedTable.dormant(*shape),
            Evidence.none(*shape),
            np.zeros(shape, np.int64),
            Holdings.pooled(host, buffers, {}),
        )

    def replace(self, rows: NDArray[np.int64], networks: Sequence[Network]) -> None:
        """Put new networks, with the fossils they start with, into ``rows``, int64 ``[r]``; all others go on untouched.

        Raises:
            IllegalActionError: a blueprint does not serve the slot where a network is to start with it.
        """
        held, index = self.state.holdings, torch.from_numpy(rows)
        values = torch.stack([self._host_shape.row(network.host) for network in networks])
        rates = torch.tensor([network.learning_rate for network in networks], dtype=torch.float64)
        fresh = {
            name: torch.stack([pad(network.host.get_buffer(name), shape) for network in networks])
            for name, shape in self._buffer_shapes.items()
        }
        banks = {key: bank.without(index) for key, bank in held.banks.items()}
        germinations = self.germinations.copy()
        germinations[rows] = 0
        roster = self.state.roster.replaced(rows.tolist(), networks)
        blueprints = np.full(germinations.shape, NO_BLUEPRINT, np.int64)
        blends = np.zeros_like(blueprints)
        for row, network in zip(rows.tolist(), networks, strict=True):
            for slot, blueprint, blend in network.fossils:
                blueprints[row, slot], blends[row, slot] = blueprint, blend
        table, changes = with_fossils(self.table.reset(rows), blueprints, blends, roster.compatible)
        host, buffers = held.renewed_hosts(index, values, rates, fresh)
        banks = self._with_newborns(banks, changes, roster, host.learning_rates, germinations)
        self.state = PopulationState(
            roster,
            table,
            self.evidence.without(np.isin(np.arange(self.size), rows)[:, None]),
            _counted(germinations, changes),
            Holdings.pooled(host, buffers, banks),
        )

    def legal_actions(self) -> ActionMasks:
        """What each network's controller may do now."""
        return legal_actions(self.table, self.evidence, self.plan.rules, self.state.roster.compatible, self._affordable)

    def decide(self, actions: Actions) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots go on with their lives.

        Raises:
            IllegalActionError: an action is not legal.

        Whatever else a blueprint or a lack of memory raises passes through; nothing has changed then.
        """
        state = self.state
        result = step(state.table, state.evidence, actions, self.plan.rules, state.roster.compatible, self._affordable)
        changes = result.transitions
        holdings = state.holdings
        if (changes.born | (changes.after == Stage.PRUNED)).any():
            kept, rates = survivors(holdings.banks, changes), holdings.host.learning_rates
            banks = self._with_newborns(kept, changes, state.roster, rates, state.germinations)
            holdings = Holdings.pooled(holdings.host, holdings.host_buffers, banks)
        germinations = _counted(state.germinations, changes)
        evidence = forget(state.evidence, changes)
        self.state = PopulationState(state.roster, result.table, evidence, germinations, holdings)
        return result

    def _with_newborns(
        self,
        banks: Mapping[SeedKind, Bank],
        changes: Transitions,
        roster: Roster,
        learning_rates: Tensor,
        germinations: NDArray[np.int64],
    ) -> Mapping[SeedKind, Bank]:
        """The banks with the seeds that came in ``changes``.

        ``learning_rates [E]`` are the networks'; ``germinations [E, S]`` counts the earlier seeds of each slot.
        """
        grown = dict(banks)
        for kind in _kinds(changes, changes.born):
            owners = changes.env[changes.born & _is_of(changes, kind)].astype(np.int64)
            seeds = [roster.new_seed(owner, kind, int(germinations[owner, kind.slot])) for owner in owners.tolist()]
            rates = learning_rates[torch.from_numpy(owners).to(learning_rates.device, non_blocking=True)]
            bank = grown[kind] if kind in grown else self._empty_bank(kind)
            grown[kind] = bank.extended(seeds, rates, torch.from_numpy(owners))
        return grown

    def _empty_bank(self, key: SeedKind) -> Bank:
        if key not in self._bank_templates:
            kind, site = self.state.roster.kinds[key.blueprint], self.execution.sites[key.slot]
            template = joined(kind(site, torch.Generator().manual_seed(0)), site, key.blend)
            self._bank_templates[key] = Bank.empty(template, self._moment_names, self.plan.dtype, self.plan.device)
        return self._bank_templates[key]

    @property
    def _affordable(self) -> NDArray[np.bool_]:
        return affordable(self.plan.budget, self.state.roster.costs, self.table, self.plan.rules.blends)

    @property
    def roster(self) -> Roster:
        """The networks as they were given, and what their widths imply."""
        return self.state.roster

    @property
    def table(self) -> SeedTable:
        """The state of every slot."""
        return self.state.table

    @property
    def evidence(self) -> Evidence:
        """What was measured of the seeds; set it after measuring."""
        return self.state.evidence

    @evidence.setter
    def evidence(self, measured: Evidence) -> None:
        self.state = replace(self.state, evidence=measured)

    @property
    def germinations(self) -> NDArray[np.int64]:
        """Seeds that each slot has had, ``[E, S]``."""
        return self.state.germinations

    @property
    def host(self) -> RowBlock:
        """The hosts' rows."""
        return self.state.holdings.host

    @property
    def host_buffers(self) -> Mapping[str, Tensor]:
        """The hosts' buffers by name, each ``[E, *shape]``; forward passes in training mode write into them."""
        return self.state.holdings.host_buffers

    @property
    def banks(self) -> Mapping[SeedKind, Bank]:
        """All seeds, by kind."""
        return self.state.holdings.banks

    @property
    def pool(self) -> Pool:
        """All rows in one flat vector, in the order of `blocks`."""
        return self.state.holdings.pool

    @property
    def blocks(self) -> list[RowBlock]:
        """Every row block: the hosts' first, then the banks'."""
        return self.state.holdings.blocks

    @property
    def host_parameters(self) -> NDArray[np.int64]:
        """Parameters of each network before any growth, ``[E]``."""
        return self.roster.host_parameters

    @property
    def budget_left(self) -> NDArray[np.float64]:
        """``[E]``: the share of the scarcest cap that is not spent yet."""
        return budget_left(self.plan.budget, self.state.roster.costs, self.table)

    def slots_of_layout(self, layout: Layout) -> NDArray[np.bool_]:
        """Bool ``[E, S]``: whether the slot's features have this layout."""
        return np.tile([site.layout is layout for site in self.execution.sites], (self.size, 1))

    def parameters_in(self, counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """``[E]``: live parameters of the seeds in the slots ``counted``, bool ``[E, S]``."""
        return (self.state.roster.costs.parameters.resident(self.table) * counted).sum(axis=1)


def _counted(germinations: NDArray[np.int64], changes: Transitions) -> NDArray[np.int64]:
    """Seeds that each slot has had, ``[E, S]``, those that came in ``changes`` included."""
    counted = germinations.copy()
    counted[changes.env[changes.born], changes.slot[changes.born]] += 1
    return counted


def forget(evidence: Evidence, transitions: Transitions) -> Evidence:
    """Evidence without what was known of seeds that have just come or gone."""
    changed = transitions.born | (transitions.after == Stage.PRUNED)
    slots = np.zeros(evidence.probed.shape, np.bool_)
    slots[transitions.env[changed], transitions.slot[changed]] = True
    return evidence.without(slots)


def survivors(banks: Mapping[SeedKind, Bank], changes: Transitions) -> Mapping[SeedKind, Bank]:
    """The banks without the seeds that were pruned in ``changes``."""
    kept = dict(banks)
    died = changes.after == Stage.PRUNED
    for kind in _kinds(changes, died):
        leaving = changes.env[died & _is_of(changes, kind)]
        kept[kind] = kept[kind].without(torch.from_numpy(leaving.astype(np.int64)))
    return kept


def _kinds(changes: Transitions, chosen: NDArray[np.bool_]) -> list[SeedKind]:
    columns = (changes.slot, changes.blueprint, changes.blend)
    found = set(zip(*(column[chosen].tolist() for column in columns), strict=True))
    return [SeedKind(slot, blueprint, Blend(blend)) for slot, blueprint, blend in sorted(found)]


def _is_of(changes: Transitions, kind: SeedKind) -> NDArray[np.bool_]:
    return (changes.slot == kind.slot) & (changes.blueprint == kind.blueprint) & (changes.blend == kind.blend)
