"""A population: E networks of one architecture, their seeds, and the lifecycle table that says what is what.

It owns every parameter. Whether a seed is born or dies is decided by the lifecycle's pure functions; this file only
carries it out. All that changes is one immutable state, exchanged in one assignment once the new one is complete: a
call that fails, for whatever reason, leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.budget import Budget, Charge, Cost, Costs, affordable_blueprints, budget_left
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.seed import blend_blueprint, count_blend_flops, count_blend_parameters
from esper.growth.site import Layout, Site
from esper.lifecycle.actions import Blend
from esper.lifecycle.legality import ActionMasks, legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import Step, Transitions, add_fossils, step
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import module_generator
from esper.population.execution import Execution
from esper.population.optimizers import MOMENT_NAMES
from esper.population.parameters import (
    FlatParameters,
    PopulationParameters,
    SeedBank,
    SeedKind,
    SeedModule,
    StackedParameters,
)
from esper.tasks.suite import OptimizerSettings

Fossils = tuple[SeedKind, ...]
"""Finished seeds of one network."""


class NetworkSpec(NamedTuple):
    """What one network of a population starts from."""

    host: nn.Module
    """Its architecture is the template's; it is at most as wide, freshly initialised."""
    widths: tuple[int, ...]
    """Its live channels at each slot."""
    learning_rate: float
    seed: int
    """All that is random about its seeds follows from this."""
    fossils: Fossils = ()
    """What it has from the first step on, fresh and at alpha 1; nothing, if it is to grow by itself."""


@dataclass(frozen=True)
class NetworkSpecs:
    """E networks with K blueprints on offer at each of their S slots."""

    networks: Sequence[NetworkSpec]
    sites: Sequence[Site]
    """At full width, one per slot."""
    kinds: Sequence[type[Blueprint]]
    bytes_per_parameter: int
    """For a value, its gradient and its optimizer state."""

    @property
    def widths(self) -> Ints:
        """Live channels at each slot, ``[E, S]``."""
        return self._widths

    @property
    def learning_rates(self) -> Floats:
        """``[E]``."""
        return self._learning_rates

    @cached_property
    def _widths(self) -> Ints:
        return np.array([network.widths for network in self.networks])

    @cached_property
    def _learning_rates(self) -> Floats:
        return np.array([network.learning_rate for network in self.networks])

    @cached_property
    def host_parameters(self) -> Ints:
        """Parameters before any growth, ``[E]``."""
        return np.array([sum(part.numel() for part in network.host.parameters()) for network in self.networks])

    @property
    def costs(self) -> Costs:
        """What seeds would cost."""
        return self._catalogue[0]

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint serves a slot, ``[E, S, K]``."""
        return self._catalogue[1]

    @cached_property
    def _catalogue(self) -> tuple[Costs, Bools]:
        places = [list(enumerate(network.widths)) for network in self.networks]
        # Slots of equal widths cost the same.
        distinct = sorted({place for own in places for place in own})
        number = {place: index for index, place in enumerate(distinct)}
        known = [_price_slot(self.kinds, self.sites[slot].with_width(width)) for slot, width in distinct]
        chosen = np.array([[number[place] for place in own] for own in places])  # [E, S]
        parameters, flops, serves, blend_parameters, blend_flops = (
            np.stack(column)[chosen] for column in zip(*known, strict=True)
        )
        added = Cost(parameters, blend_parameters)
        return Costs(added, Cost(flops, blend_flops), added.scale(self.bytes_per_parameter)), serves

    def with_networks(self, rows: Sequence[int], networks: Sequence[NetworkSpec]) -> NetworkSpecs:
        """The specs with other networks at ``rows``."""
        changed = list(self.networks)
        for row, network in zip(rows, networks, strict=True):
            changed[row] = network
        return replace(self, networks=changed)

    def new_seed(self, network: int, kind: SeedKind, tries: int) -> SeedModule:
        """A fresh seed; ``tries`` counts the earlier seeds of that slot.

        Whatever the blueprint's constructor raises passes through.
        """
        owner = self.networks[network]
        site = self.sites[kind.slot].with_width(owner.widths[kind.slot])
        blueprint = self.kinds[kind.blueprint](site, module_generator(owner.seed, kind.slot, tries))
        return blend_blueprint(blueprint, site, kind.blend)


class _SlotPrices(NamedTuple):
    """What there is for one slot."""

    parameters: Ints
    """Each blueprint's, ``[K]``; 0 where it does not serve."""
    flops: Ints
    serves: Bools
    blend_parameters: Ints
    """Each `Blend`'s, ``[3]``."""
    blend_flops: Ints


def _price_slot(kinds: Sequence[type[Blueprint]], site: Site) -> _SlotPrices:
    serves = [kind.supports(site) for kind in kinds]
    return _SlotPrices(
        np.array([kind.parameters_at(site) if fits else 0 for kind, fits in zip(kinds, serves, strict=True)], np.int64),
        np.array([kind.flops_at(site) if fits else 0 for kind, fits in zip(kinds, serves, strict=True)], np.int64),
        np.array(serves, np.bool_),
        np.array([count_blend_parameters(blend, site) for blend in Blend]),
        np.array([count_blend_flops(blend, site) for blend in Blend]),
    )


Strategy = Literal["stacked", "looped"]
"""How the networks are run: as one program, or one after the other. The results are the same."""
StrategyChoice = Strategy | Literal["auto"]
"""``auto``: whichever is faster here, found out by timing both once."""
STRATEGIES: tuple[Strategy, ...] = ("stacked", "looped")


@dataclass(frozen=True)
class PopulationConfig:
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


Actions = Ints


@dataclass(frozen=True)
class PopulationState:
    """All of a population that changes. Optimizers write into the parameters; everything else is replaced."""

    specs: NetworkSpecs
    table: SeedTable
    evidence: Evidence
    germinations: Ints
    """Seeds that each slot has had, ``[E, S]``."""
    parameters: PopulationParameters


class Population:
    """E networks, computed as one program. Networks never influence one another.

    Raises:
        SlotError: a slot's name does not fit the template.
        UnknownBlueprintError: a blueprint is not registered.
    """

    def __init__(self, config: PopulationConfig, networks: Sequence[NetworkSpec]) -> None:
        template = config.template.to(device=config.device, dtype=config.dtype)
        example = config.example_input.to(device=config.device, dtype=config.dtype)
        self.config = config
        self.execution = Execution(template, config.slots, example)
        self.shares_prefixes = self.execution.can_share_prefixes(example)
        self.size = len(networks)
        self.strategy: Strategy = config.strategy
        self._moment_names = MOMENT_NAMES[config.optimizer.name]
        self._empty_hosts = StackedParameters.empty(template, self._moment_names, config.dtype, config.device)
        self._empty_banks: dict[SeedKind, SeedBank] = {}
        self.state = self._blank_state(networks)
        self.replace(np.arange(self.size), networks)

    def _blank_state(self, networks: Sequence[NetworkSpec]) -> PopulationState:
        """Rows of zeros for all networks."""
        config, shape = self.config, (self.size, len(self.config.slots))
        kinds = [get(name) for name in config.blueprints]
        # A value, its gradient and its moments.
        bytes_per_parameter = config.dtype.itemsize * (2 + len(self._moment_names))
        none = self._empty_hosts
        host = none.with_rows(
            none.values.new_zeros(self.size, none.layout.size),
            {name: buffer.new_zeros(self.size, *buffer.shape[1:]) for name, buffer in none.buffers.items()},
            torch.zeros(self.size),
            torch.arange(self.size),
        )
        return PopulationState(
            NetworkSpecs(list(networks), self.execution.sites, kinds, bytes_per_parameter),
            SeedTable.dormant(*shape),
            Evidence.none(*shape),
            np.zeros(shape, np.int64),
            PopulationParameters.build(host, {}),
        )

    def replace(self, rows: Ints, networks: Sequence[NetworkSpec]) -> None:
        """Put new networks, with the fossils they start with, into ``rows``, int64 ``[r]``; all others go on untouched.

        Raises:
            IllegalActionError: a blueprint does not serve the slot where a network is to start with it.
        """
        held, index = self.state.parameters, torch.from_numpy(rows)
        values, buffers = held.host.stack([network.host for network in networks])
        rates = torch.tensor([network.learning_rate for network in networks], dtype=torch.float64)
        host = held.host.reset_rows(index, values, buffers, rates)
        banks = {kind: bank.without(index) for kind, bank in held.banks.items()}
        germinations = self.germinations.copy()
        germinations[rows] = 0
        specs = self.state.specs.with_networks(rows.tolist(), networks)
        blueprints = np.full(germinations.shape, NO_BLUEPRINT, np.int64)
        blends = np.zeros_like(blueprints)
        for row, network in zip(rows.tolist(), networks, strict=True):
            for slot, blueprint, blend in network.fossils:
                blueprints[row, slot], blends[row, slot] = blueprint, blend
        replaced = np.isin(np.arange(self.size), rows)
        table, changes = add_fossils(self.table.reset(replaced), blueprints, blends, specs.compatible)
        banks = self._add_newborns(banks, changes, specs, host.learning_rates, germinations)
        self.state = PopulationState(
            specs,
            table,
            self.evidence.without(replaced),
            _count_births(germinations, changes),
            PopulationParameters.build(host, banks),
        )

    def legal_actions(self) -> ActionMasks:
        """What each network's controller may do now."""
        return legal_actions(
            self.table, self.evidence, self.config.rules, self.state.specs.compatible, self._affordable
        )

    def decide(self, actions: Actions) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots go on with their lives.

        Raises:
            IllegalActionError: an action is not legal.

        Whatever else a blueprint or a lack of memory raises passes through; nothing has changed then.
        """
        state = self.state
        result = step(state.table, state.evidence, actions, self.config.rules, state.specs.compatible, self._affordable)
        changes = result.transitions
        parameters = state.parameters
        if (changes.born | (changes.after == Stage.PRUNED)).any():
            kept, rates = drop_pruned(parameters.banks, changes), parameters.host.learning_rates
            banks = self._add_newborns(kept, changes, state.specs, rates, state.germinations)
            parameters = PopulationParameters.build(parameters.host, banks)
        germinations = _count_births(state.germinations, changes)
        evidence = forget_changed(state.evidence, changes)
        self.state = PopulationState(state.specs, result.table, evidence, germinations, parameters)
        return result

    def _add_newborns(
        self,
        banks: Mapping[SeedKind, SeedBank],
        changes: Transitions,
        specs: NetworkSpecs,
        learning_rates: Tensor,
        germinations: Ints,
    ) -> Mapping[SeedKind, SeedBank]:
        """The banks with the seeds that came in ``changes``.

        ``learning_rates [E]`` are the networks'; ``germinations [E, S]`` counts the earlier seeds of each slot.
        """
        grown = dict(banks)
        for kind in _list_kinds(changes, changes.born):
            owners = changes.env[changes.born & _is_of(changes, kind)].astype(np.int64)
            seeds = [specs.new_seed(owner, kind, int(germinations[owner, kind.slot])) for owner in owners.tolist()]
            rates = learning_rates[torch.from_numpy(owners).to(learning_rates.device, non_blocking=True)]
            bank = grown[kind] if kind in grown else self._empty_bank(kind)
            grown[kind] = bank.with_seeds(seeds, rates, torch.from_numpy(owners))
        return grown

    def _empty_bank(self, kind: SeedKind) -> SeedBank:
        if kind not in self._empty_banks:
            blueprint, site = self.state.specs.kinds[kind.blueprint], self.execution.sites[kind.slot]
            template = blend_blueprint(blueprint(site, torch.Generator().manual_seed(0)), site, kind.blend)
            self._empty_banks[kind] = SeedBank.empty(
                template, self._moment_names, self.config.dtype, self.config.device
            )
        return self._empty_banks[kind]

    @property
    def _affordable(self) -> Bools:
        return affordable_blueprints(self.config.budget, self.state.specs.costs, self.table, self.config.rules.blends)

    @property
    def specs(self) -> NetworkSpecs:
        """The networks as they were given, and what their widths imply."""
        return self.state.specs

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
    def germinations(self) -> Ints:
        """Seeds that each slot has had, ``[E, S]``."""
        return self.state.germinations

    @property
    def host(self) -> StackedParameters:
        """The hosts' rows; forward passes in training mode write into their buffers."""
        return self.state.parameters.host

    @property
    def banks(self) -> Mapping[SeedKind, SeedBank]:
        """All seeds, by kind."""
        return self.state.parameters.banks

    @property
    def flat(self) -> FlatParameters:
        """All rows in one flat vector: the hosts', then the banks'."""
        return self.state.parameters.flat

    @property
    def host_parameters(self) -> Ints:
        """Parameters of each network before any growth, ``[E]``."""
        return self.specs.host_parameters

    @property
    def budget_left(self) -> Floats:
        """``[E]``: the share of the scarcest cap that is not spent yet."""
        return budget_left(self.config.budget, self.state.specs.costs, self.table)

    @property
    def charge(self) -> Charge:
        """What rent is paid on: parameters."""
        return Charge(self.state.specs.costs.parameters, self.host_parameters)

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Bool ``[E, S]``: whether the slot's features have this layout."""
        return np.tile([site.layout is layout for site in self.execution.sites], (self.size, 1))

    def parameters_in(self, counted: Bools) -> Ints:
        """``[E]``: live parameters of the seeds in the slots ``counted``, bool ``[E, S]``."""
        return (self.state.specs.costs.parameters.resident(self.table) * counted).sum(axis=1)


def _count_births(germinations: Ints, changes: Transitions) -> Ints:
    """Seeds that each slot has had, ``[E, S]``, those that came in ``changes`` included."""
    counted = germinations.copy()
    counted[changes.env[changes.born], changes.slot[changes.born]] += 1
    return counted


def forget_changed(evidence: Evidence, transitions: Transitions) -> Evidence:
    """Evidence without what was known of seeds that have just come or gone."""
    changed = transitions.born | (transitions.after == Stage.PRUNED)
    slots = np.zeros(evidence.probed.shape, np.bool_)
    slots[transitions.env[changed], transitions.slot[changed]] = True
    return evidence.without(slots)


def drop_pruned(banks: Mapping[SeedKind, SeedBank], changes: Transitions) -> Mapping[SeedKind, SeedBank]:
    """The banks without the seeds that were pruned in ``changes``."""
    kept = dict(banks)
    died = changes.after == Stage.PRUNED
    for kind in _list_kinds(changes, died):
        leaving = changes.env[died & _is_of(changes, kind)]
        kept[kind] = kept[kind].without(torch.from_numpy(leaving.astype(np.int64)))
    return kept


def _list_kinds(changes: Transitions, chosen: Bools) -> list[SeedKind]:
    columns = (changes.slot, changes.blueprint, changes.blend)
    found = set(zip(*(column[chosen].tolist() for column in columns), strict=True))
    return [SeedKind(slot, blueprint, Blend(blend)) for slot, blueprint, blend in sorted(found)]


def _is_of(changes: Transitions, kind: SeedKind) -> Bools:
    return (changes.slot == kind.slot) & (changes.blueprint == kind.blueprint) & (changes.blend == kind.blend)
