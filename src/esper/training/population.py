"""A population: E networks of one architecture, their seeds, and the lifecycle table that says what is what.

It owns every parameter. Whether a seed is born or dies is decided by the lifecycle's pure functions; this file only
carries it out. All that changes is one immutable state, exchanged in one assignment once the new one is complete: a
call that fails, for whatever reason, leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.growth.blueprints.registry import get
from esper.growth.seed import blend_blueprint
from esper.growth.site import Layout
from esper.lifecycle.masks import ActionMasks, legal_actions
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import Step, Transitions, revoke, step, with_fossils
from esper.training.bank import Bank
from esper.training.budget import affordable, budget_left
from esper.training.execution import Execution
from esper.training.holdings import Holdings, survivors, with_newborns
from esper.training.optimizers import MOMENT_NAMES
from esper.training.plan import PopulationPlan, Strategy
from esper.training.pool import Pool
from esper.training.roster import Network, Roster, SeedKind
from esper.training.rows import RowBlock, RowShape, pad
from esper.training.snapshots import Snapshots

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
        banks = with_newborns(banks, changes, roster, host.learning_rates, germinations, self._empty_bank)
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
        holdings = state.holdings.after(changes, state.roster, state.germinations, self._empty_bank)
        germinations = _counted(state.germinations, changes)
        evidence = _forgotten(state.evidence, changes)
        self.state = PopulationState(state.roster, result.table, evidence, germinations, holdings)
        return result

    def roll_back(self, rows: NDArray[np.int64], snapshots: Snapshots) -> Transitions:
        """Restore the networks ``rows``, int64 ``[r]``, as their snapshots have them; all others are left as they are.

        Hosts, their buffers and fossils get back their values and start with a fresh optimizer; live seeds are pruned,
        and so is a fossil that germinated after the snapshot, of which no good values are known.

        Raises:
            ValueError: a network has no snapshot.
        """
        state = self.state
        afflicted = np.zeros(self.size, np.bool_)
        afflicted[rows] = True
        fossils = (state.table.stage == Stage.FOSSILIZED) & snapshots.knows(state.germinations)
        table, changes = revoke(state.table, afflicted[:, None] & ~fossils)
        banks = survivors(state.holdings.banks, changes)
        holdings = snapshots.restored(torch.from_numpy(rows), replace(state.holdings, banks=banks))
        evidence = _forgotten(state.evidence, changes)
        self.state = replace(state, table=table, evidence=evidence, holdings=holdings)
        return changes

    def _empty_bank(self, key: SeedKind) -> Bank:
        if key not in self._bank_templates:
            kind, site = self.state.roster.kinds[key.blueprint], self.execution.sites[key.slot]
            template = blend_blueprint(kind(site, torch.Generator().manual_seed(0)), site, key.blend)
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


def _forgotten(evidence: Evidence, transitions: Transitions) -> Evidence:
    """Evidence without what was known of seeds that have just come or gone."""
    changed = transitions.born | (transitions.after == Stage.PRUNED)
    slots = np.zeros(evidence.probed.shape, np.bool_)
    slots[transitions.env[changed], transitions.slot[changed]] = True
    return evidence.without(slots)
