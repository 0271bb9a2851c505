"""A population: E networks of one architecture, their seeds, and the lifecycle table of all slots.

The lifecycle's pure functions decide which seeds are added and removed; this module carries that out. The whole state
is one immutable object, replaced in one assignment once the new one is complete: a call that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.budget import Budget, Charge, Cost, Costs, affordable_blueprints, budget_left
from esper.engine.gradients import GradientHealthSettings
from esper.errors import ConfigError, SlotError
from esper.growth.blueprints.registry import Blueprint, Context, get
from esper.growth.site import Layout, Site
from esper.growth.slot import blend_blueprint, count_blend_parameters, require_blends
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import ActionMasks, Rules, legal_actions
from esper.lifecycle.table import NO_BLUEPRINT, SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import Step, Transitions, add_fossils, clear_changed_measurements, step
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import module_generator
from esper.population.execution import Execution
from esper.population.host_checks import require_bf16, require_splittable_minibatches
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
"""Kinds of the finished seeds of one network."""


class NetworkSpec(NamedTuple):
    """What one network of a population starts from."""

    host: nn.Module
    """A freshly initialised host with the template's architecture, at most as wide."""
    widths: tuple[int, ...]
    """Number of live channels at each slot."""
    learning_rate: float
    seed: int
    """Random seed of everything that is drawn for the network's modules."""
    fossils: Fossils = ()
    """Modules that the network has from the first step, freshly initialised and at alpha 1."""


class NetworkSpecs:
    """E networks with K blueprints (``kinds``) at each of their S ``sites``, of full width, and the costs; immutable.

    ``bytes_per_parameter``: memory of a value with its gradient and its optimizer state.
    """

    def __init__(
        self,
        networks: Sequence[NetworkSpec],
        sites: Sequence[Site],
        kinds: Sequence[type[Blueprint]],
        bytes_per_parameter: int,
    ) -> None:
        self.networks, self.sites, self.kinds, self._bytes_per_parameter = networks, sites, kinds, bytes_per_parameter
        self.widths: Ints = np.array([network.widths for network in networks])
        """Number of live channels at each slot, ``[E, S]``."""
        self.learning_rates: Floats = np.array([network.learning_rate for network in networks])
        """``[E]``."""
        self.host_parameters: Ints = np.array(
            [sum(p.numel() for p in network.host.parameters()) for network in networks]
        )
        """Number of parameters before any growth, ``[E]``."""
        # Networks with equal widths at a slot share a site.
        self.sites_by_sizes: list[dict[tuple[int, ...], Site]] = [{} for _ in sites]
        """The distinct sites of the networks at each slot, by their `Site.sizes`."""
        self.site_places: Ints = np.zeros(self.widths.shape, np.int64)
        """Index of each network's site among these, ``[E, S]``."""
        for slot, (widest, found) in enumerate(zip(sites, self.sites_by_sizes, strict=True)):
            for row, network in enumerate(networks):
                site = widest.find_in(network.host, network.widths[slot])
                found.setdefault(site.sizes, site)
                self.site_places[row, slot] = list(found).index(site.sizes)
        self.costs, self.compatible = self._price_seeds()
        """What seeds would cost, and whether a blueprint supports a slot, ``[E, S, K]``."""

    def _price_seeds(self) -> tuple[Costs, Bools]:
        shape = (*self.widths.shape, len(self.kinds))
        compatible = np.zeros(shape, np.bool_)
        parameters, flops = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        blend_parameters = np.zeros((*self.widths.shape, len(Blend)), np.int64)
        for slot, sites in enumerate(self.sites_by_sizes):
            for place, site in enumerate(sites.values()):
                rows = self.site_places[:, slot] == place
                for index, kind in enumerate(self.kinds):
                    if kind.supports(site):
                        compatible[rows, slot, index] = True
                        parameters[rows, slot, index], flops[rows, slot, index] = kind.cost_at(site)
                for blend in Blend:
                    blend_parameters[rows, slot, blend] = count_blend_parameters(blend, site)
        added = Cost(parameters, blend_parameters)
        return Costs(added, Cost.of_blueprints(flops), added.scale(self._bytes_per_parameter)), compatible

    def with_networks(self, rows: Sequence[int], networks: Sequence[NetworkSpec]) -> NetworkSpecs:
        """The specs with other networks at ``rows``."""
        changed = list(self.networks)
        for row, network in zip(rows, networks, strict=True):
            changed[row] = network
        return NetworkSpecs(changed, self.sites, self.kinds, self._bytes_per_parameter)

    def create_seed(self, network: int, kind: SeedKind, predecessors: int) -> SeedModule:
        """A new seed; ``predecessors`` is the number of earlier seeds in that slot."""
        spec, slot = self.networks[network], kind.slot
        site = list(self.sites_by_sizes[slot].values())[int(self.site_places[network, slot])]
        blueprint = self.kinds[kind.blueprint](site, module_generator(spec.seed, slot, predecessors))
        return blend_blueprint(blueprint, site, kind.blend)


MOMENT_NAMES: dict[str, tuple[str, ...]] = {"adamw": ("mean", "square"), "sgd": ("velocity",)}
"""Names of the optimizer state of each row, by optimizer."""
Strategy = Literal["stacked", "looped"]
"""How the networks are computed, with the same results: as one program, or one after the other."""
StrategyChoice = Strategy | Literal["auto"]
"""``auto`` is the faster strategy for the given hosts and device, found by timing both once."""
STRATEGIES: tuple[Strategy, ...] = ("stacked", "looped")
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class PopulationConfig:
    """The architecture of a population, what may grow on it, and how it is trained."""

    template: nn.Module
    """The host at full width; only its architecture matters."""
    slots: tuple[str | tuple[str, ...], ...]
    """Submodules that get a slot, first to last; a tuple names modules between which hidden units may grow, as in
    `Suite.sites`."""
    blueprints: tuple[str, ...]
    """Registry names of the available blueprints; a blueprint's index in actions and tables is its index here."""
    example_input: Tensor
    """``[B, ...]``, for the forward pass that probes the host."""
    optimizer: OptimizerSettings = OptimizerSettings()
    rules: Rules = Rules()
    strategy: Strategy = "stacked"
    """How the networks are computed; hosts that vmap cannot handle, or that draw random numbers, are always looped."""
    networks_per_pass: int | None = None
    """Largest number of networks that are computed at once, to limit memory; None: all. Results do not depend on it."""
    examples_per_pass: int | None = None
    """Largest number of examples that are computed at once, in training and in measurements; None: all. Gradients of
    the parts of a minibatch are added up, so results change only by rounding; hosts for which that does not hold are
    refused."""
    bf16: bool = False
    """Whether all forward passes are computed under autocast in bfloat16. Parameters, optimizer state, losses and
    promises stay in ``dtype``, which must be float32."""
    dtype: torch.dtype = torch.float32
    """float32 or float64. With lower precision an optimizer's step count stops increasing, in bfloat16 at 256."""
    device: torch.device = torch.device("cpu")
    budget: Budget = Budget()
    gradient_health: GradientHealthSettings = GradientHealthSettings()
    """The ratios at which gradients count as vanished or exploded in training reports."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"a population's dtype is {self.dtype}: choose torch.float32 or torch.float64, "
                "as optimizers count steps in it"
            )
        if self.bf16 and self.dtype != torch.float32:
            raise ConfigError(f"bf16 needs parameters in float32, and dtype is {self.dtype}: set bf16 to false")


Actions = Ints
"""One action per network, int64 ``[E, 8]``."""


@dataclass(frozen=True)
class PopulationState:
    """What changes of a population. Optimizers write into the parameters; everything else is replaced."""

    specs: NetworkSpecs
    table: SeedTable
    measurements: SeedMeasurements
    germinations: Ints
    """Seeds that each slot has had, ``[E, S]``."""
    parameters: PopulationParameters


class Population:
    """E networks, computed as one program. Networks never influence one another."""

    def __init__(self, config: PopulationConfig, networks: Sequence[NetworkSpec]) -> None:
        self.config, self.size = config, len(networks)
        self._moment_names = MOMENT_NAMES[config.optimizer.name]
        self._empty_banks: dict[SeedKind, SeedBank] = {}
        kinds = [get(name) for name in config.blueprints]
        require_blends(config.rules.blends, kinds)
        _require_slots_for(kinds, config.slots)

        # The architecture with its slots, and how it is computed for many networks at once.
        template = config.template.to(device=config.device, dtype=config.dtype, non_blocking=True)
        example = config.example_input.to(device=config.device, dtype=config.dtype, non_blocking=True)
        if config.bf16:
            require_bf16(template, example)
        self.execution = Execution(template, config.slots, example)
        if config.examples_per_pass is not None:
            require_splittable_minibatches(template, example, draws=self.execution.draws)
        self.strategy: Strategy = "looped" if self.execution.needs_loop else config.strategy
        self.shares_prefixes = self.execution.can_share_prefixes(example)

        # Rows of zeros for all networks; `replace` fills them, as it does whenever networks are exchanged later on.
        shape = (self.size, len(config.slots))
        # A value, its gradient and its moments.
        bytes_per_parameter = config.dtype.itemsize * (2 + len(self._moment_names))
        empty = StackedParameters.empty(template, self._moment_names, config.dtype, config.device)
        host = empty.make_rows(
            empty.values.new_zeros(self.size, empty.layout.size),
            {name: buffer.new_zeros(self.size, *buffer.shape[1:]) for name, buffer in empty.buffers.items()},
            learning_rates=torch.zeros(self.size),
            owners=torch.arange(self.size),
        )
        self.state = PopulationState(
            NetworkSpecs(networks, self.execution.sites, kinds, bytes_per_parameter),
            SeedTable.dormant(*shape),
            SeedMeasurements.none(*shape),
            np.zeros(shape, np.int64),
            PopulationParameters.build(host, {}),
        )
        self.replace(np.arange(self.size), networks)

    def replace(self, rows: Ints, networks: Sequence[NetworkSpec]) -> None:
        """Put new networks, with their initial fossils, into ``rows``, int64 ``[r]``; all others stay unchanged."""
        # Hosts with new values and without seeds.
        state, index = self.state, torch.from_numpy(rows)
        replaced = np.isin(np.arange(self.size), rows)
        specs = state.specs.with_networks(rows.tolist(), networks)
        values, buffers = state.parameters.host.stack_modules([network.host for network in networks])
        rates = torch.tensor([network.learning_rate for network in networks], dtype=torch.float64)
        host = state.parameters.host.reset_rows(index, values, buffers, rates)
        banks = {kind: bank.without(index) for kind, bank in state.parameters.banks.items()}
        germinations = state.germinations.copy()
        germinations[rows] = 0

        # The initial fossils of the networks, in the table and as modules.
        blueprints = np.full(germinations.shape, NO_BLUEPRINT, np.int64)
        blends = np.zeros_like(blueprints)
        for row, network in zip(rows.tolist(), networks, strict=True):
            for slot, blueprint, blend in network.fossils:
                blueprints[row, slot], blends[row, slot] = blueprint, blend
        table, changes = add_fossils(state.table.reset(replaced), blueprints, blends, specs.compatible)
        newborn = self._create_seeds(changes, specs, germinations)
        self.state = PopulationState(
            specs,
            table,
            state.measurements.without(replaced),
            _count_births(germinations, changes),
            PopulationParameters.build(host, banks).exchange_seeds({}, newborn),
        )

    def legal_actions(self) -> ActionMasks:
        """The legal actions of each network's controller."""
        return legal_actions(self.table, self.measurements, self.config.rules, self.specs.compatible, self._affordable)

    def decide(self, actions: Actions) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots live on; all of it or nothing."""
        state = self.state
        result = step(
            state.table, state.measurements, actions, self.config.rules, state.specs.compatible, self._affordable
        )
        changes = result.transitions

        # Rows are moved into a new flat vector only if seeds are added or removed.
        parameters = state.parameters
        pruned = changes.after == Stage.PRUNED
        if (changes.born | pruned).any():
            newborn = self._create_seeds(changes, state.specs, state.germinations)
            parameters = parameters.exchange_seeds(group_by_kind(changes, pruned), newborn)

        measurements = clear_changed_measurements(state.measurements, changes)
        germinations = _count_births(state.germinations, changes)
        self.state = PopulationState(state.specs, result.table, measurements, germinations, parameters)
        return result

    def _create_seeds(
        self, changes: Transitions, specs: NetworkSpecs, germinations: Ints
    ) -> Mapping[SeedKind, SeedBank]:
        """Banks of the seeds that germinate in ``changes``; ``germinations [E, S]`` counts earlier seeds per slot."""
        banks: dict[SeedKind, SeedBank] = {}
        for kind, owners in group_by_kind(changes, changes.born).items():
            seeds = [specs.create_seed(owner, kind, int(germinations[owner, kind.slot])) for owner in owners.tolist()]
            if kind not in self._empty_banks:
                # The template's own weights are never used.
                blueprint, site, config = self.specs.kinds[kind.blueprint], self.execution.sites[kind.slot], self.config
                template = blend_blueprint(blueprint(site, torch.Generator().manual_seed(0)), site, kind.blend)
                self._empty_banks[kind] = SeedBank.empty(template, self._moment_names, config.dtype, config.device)
            bank, rates = self._empty_banks[kind], torch.from_numpy(specs.learning_rates[owners])
            rows = bank.block.make_rows(*bank.block.stack_modules(seeds), rates, torch.from_numpy(owners))
            banks[kind] = replace(bank, block=rows)
        return banks

    @property
    def _affordable(self) -> Bools:
        """``[E, S, K]``: which blueprints the budget still allows."""
        return affordable_blueprints(self.config.budget, self.specs.costs, self.table, self.config.rules.blends)

    @property
    def specs(self) -> NetworkSpecs:
        """What the networks started from, with costs and sites."""
        return self.state.specs

    @property
    def table(self) -> SeedTable:
        """The state of every slot."""
        return self.state.table

    @property
    def measurements(self) -> SeedMeasurements:
        """The measurements of the seeds; set it after measuring."""
        return self.state.measurements

    @measurements.setter
    def measurements(self, measured: SeedMeasurements) -> None:
        self.state = replace(self.state, measurements=measured)

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
        """``[E]``: the unspent share of the scarcest cap."""
        return budget_left(self.config.budget, self.specs.costs, self.table)

    @property
    def charge(self) -> Charge:
        """Rent is paid on parameters."""
        return Charge(self.specs.costs.parameters, self.host_parameters)

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Bool ``[E, S]``: whether the slot's features have this layout."""
        return np.tile([site.layout is layout for site in self.execution.sites], (self.size, 1))

    def count_seed_parameters(self, slots: Bools) -> Ints:
        """``[E]``: number of live parameters of the seeds in ``slots``, bool ``[E, S]``."""
        return (self.specs.costs.parameters.resident(self.table) * slots).sum(axis=1)


def _require_slots_for(kinds: Sequence[type[Blueprint]], slots: Sequence[str | tuple[str, ...]]) -> None:
    """Reject blueprints that no population supports, and hidden units without layers to add them to, or vice versa."""
    of_one_layer = next((kind.name for kind in kinds if kind.context in (Context.LAYER, Context.CALL)), None)
    if of_one_layer is not None:
        raise SlotError(
            f"{of_one_layer!r} is made for a layer of a single model, and fits no slot of a population: offer others"
        )
    pair = next((place for place in slots if not isinstance(place, str)), None)
    units = next((kind.name for kind in kinds if kind.context is Context.HIDDEN), None)
    if pair is not None and units is None:
        raise SlotError(
            f"no hidden units are on offer between the modules {pair}: offer 'units_8', or name the last alone"
        )
    if pair is None and units is not None:
        raise SlotError(
            f"{units!r} grows between two layers, and no site names such: name them and the modules between, as in "
            "('fc1', 'act', 'fc2')"
        )


def _count_births(germinations: Ints, changes: Transitions) -> Ints:
    """Number of seeds that each slot has had, ``[E, S]``, including those that germinate in ``changes``."""
    counts = germinations.copy()
    counts[changes.env[changes.born], changes.slot[changes.born]] += 1
    return counts


def group_by_kind(changes: Transitions, chosen: Bools) -> Mapping[SeedKind, Ints]:
    """The networks, int64, of the ``chosen`` changes, bool ``[N]``, by kind of seed in ascending order."""
    networks: dict[SeedKind, list[int]] = {}
    columns = (changes.env, changes.slot, changes.blueprint, changes.blend)
    for network, slot, blueprint, blend in zip(*(column[chosen].tolist() for column in columns), strict=True):
        networks.setdefault(SeedKind(slot, blueprint, Blend(blend)), []).append(network)
    return {kind: np.array(owners) for kind, owners in sorted(networks.items())}
