"""A population: E networks of one architecture, their seeds, and the lifecycle table that says what is what.

It owns every parameter. Whether a seed is born or dies is decided by the lifecycle's pure functions; this file only
carries it out, all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.site import Layout
from esper.lifecycle.masks import ActionMasks, legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import Step, Transitions, step
from esper.tasks.optimizer import OptimizerSettings
from esper.training.bank import Bank
from esper.training.execution import Execution
from esper.training.optimizers import MOMENT_NAMES
from esper.training.pool import Pool
from esper.training.rows import RowBlock, RowShape, pad

Actions = NDArray[np.int64]
Strategy = Literal["stacked", "looped"]
"""How the networks are run: as one program, or one after the other. The results are the same."""
StrategyChoice = Strategy | Literal["auto"]
"""``auto``: whichever is faster here, found out by timing both once."""
STRATEGIES: tuple[Strategy, ...] = ("stacked", "looped")
BankKey = tuple[int, int]
"""Slot index and blueprint index."""


class Network(NamedTuple):
    """What one network of a population starts from."""

    host: nn.Module
    """Of the template's architecture, at most as wide, freshly initialised."""
    widths: tuple[int, ...]
    """Its live channels at each slot."""
    learning_rate: float
    seed: int
    """All that is random about its seeds follows from this."""


@dataclass(frozen=True)
class PopulationPlan:
    """What all networks of a population share."""

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
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


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
        self.kinds: list[type[Blueprint]] = [get(name) for name in plan.blueprints]
        self.size = len(networks)
        self.strategy: Strategy = plan.strategy
        self._moment_names = MOMENT_NAMES[plan.optimizer.name]
        self._host_shape = RowShape.of(template)
        self._buffer_shapes = {name: buffer.shape for name, buffer in template.named_buffers()}
        self._bank_templates: dict[BankKey, Bank] = {}
        shape = (self.size, len(plan.slots))
        self.networks = list(networks)
        self.table = SeedTable.dormant(*shape)
        self.evidence = Evidence.none(*shape)
        self.germinations: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.banks: dict[BankKey, Bank] = {}
        empty = RowBlock.empty(self._host_shape, self._moment_names, plan.dtype, plan.device)
        unset = torch.zeros(self.size, self._host_shape.size)
        self.host = empty.extended(unset, torch.zeros(self.size), torch.arange(self.size))
        self.host_buffers = {
            name: torch.zeros(self.size, *shape, dtype=plan.dtype, device=plan.device)
            for name, shape in self._buffer_shapes.items()
        }
        self.replace(np.arange(self.size), networks)

    def replace(self, rows: NDArray[np.int64], networks: Sequence[Network]) -> None:
        """Put new networks without seeds into ``rows``, int64 ``[r]``; all others go on untouched."""
        for row, network in zip(rows.tolist(), networks, strict=True):
            self.networks[row] = network
        index = torch.from_numpy(rows)
        index_on_device = index.to(self.plan.device)
        values = torch.stack([self._host_shape.row(network.host) for network in networks])
        rates = torch.tensor([network.learning_rate for network in networks], dtype=torch.float64)
        self.host = self.host.renewed(index_on_device, values.to(self.plan.device), rates.to(self.plan.device))
        for name, shape in self._buffer_shapes.items():
            fresh = torch.stack([pad(network.host.get_buffer(name), shape) for network in networks])
            self.host_buffers[name][index_on_device] = fresh.to(self.host_buffers[name])
        self.banks = {key: bank.without(index) for key, bank in self.banks.items()}
        self.banks = {key: bank for key, bank in self.banks.items() if len(bank)}
        self._pool()
        self.table = self.table.reset(rows)
        self.evidence = _without_evidence(self.evidence, (rows, slice(None)))
        self.germinations[rows] = 0
        self.widths: NDArray[np.int64] = np.array([network.widths for network in self.networks])
        self.network_learning_rates = np.array([network.learning_rate for network in self.networks])
        self.host_parameters: NDArray[np.int64] = np.array(
            [sum(parameter.numel() for parameter in network.host.parameters()) for network in self.networks]
        )
        self.seed_parameters, self.compatible = self._costs()

    def _costs(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Parameters each blueprint would add and whether it serves the slot, both ``[E, S, K]``."""
        shape = (self.size, len(self.plan.slots), len(self.kinds))
        costs, serves = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        known: dict[tuple[int, int, int], tuple[int, bool]] = {}
        for environment, network in enumerate(self.networks):
            for slot, width in enumerate(network.widths):
                site = self.execution.sites[slot].narrowed(width)
                for index, kind in enumerate(self.kinds):
                    key = (slot, width, index)
                    if key not in known:
                        known[key] = (kind.parameters_at(site), True) if kind.serves(site) else (0, False)
                    costs[environment, slot, index], serves[environment, slot, index] = known[key]
        return costs, serves

    def legal_actions(self) -> ActionMasks:
        """What each network's controller may do now."""
        return legal_actions(self.table, self.evidence, self.plan.rules, self.compatible)

    def decide(self, actions: Actions) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots go on with their lives.

        Raises:
            IllegalActionError: an action is not legal; nothing has changed then.
        """
        result = step(self.table, self.evidence, actions, self.plan.rules, self.compatible)
        banks, germinations = self._carried_out(result.transitions)
        self.table, self.banks, self.germinations = result.table, banks, germinations
        self.evidence = _forgotten(self.evidence, result.transitions)
        self._pool()
        return result

    def _carried_out(self, transitions: Transitions) -> tuple[dict[BankKey, Bank], NDArray[np.int64]]:
        banks = dict(self.banks)
        germinations = self.germinations.copy()
        died = transitions.after == Stage.PRUNED
        for key in _keys(transitions, died):
            leaving = transitions.env[died & _at(transitions, key)]
            banks[key] = banks[key].without(torch.from_numpy(leaving.astype(np.int64)))
        born = transitions.after == Stage.GERMINATED
        for key in _keys(transitions, born):
            owners = transitions.env[born & _at(transitions, key)].astype(np.int64)
            seeds = [self._new_seed(int(owner), key, int(germinations[owner, key[0]])) for owner in owners]
            rates = self.host.learning_rates[torch.from_numpy(owners)]
            banks[key] = banks.get(key, self._empty_bank(key)).extended(seeds, rates, torch.from_numpy(owners))
            germinations[owners, key[0]] += 1
        return {key: bank for key, bank in banks.items() if len(bank)}, germinations

    def _new_seed(self, owner: int, key: BankKey, tries: int) -> Blueprint:
        slot, blueprint = key
        network = self.networks[owner]
        site = self.execution.sites[slot].narrowed(network.widths[slot])
        return self.kinds[blueprint](site, seed_generator(network.seed, slot, tries))

    def _empty_bank(self, key: BankKey) -> Bank:
        if key not in self._bank_templates:
            slot, blueprint = key
            template = self.kinds[blueprint](self.execution.sites[slot], torch.Generator().manual_seed(0))
            self._bank_templates[key] = Bank.empty(template, self._moment_names, self.plan.dtype, self.plan.device)
        return self._bank_templates[key]

    @property
    def blocks(self) -> list[RowBlock]:
        """Every row block of the population: the hosts' first, then the banks'."""
        return [self.host, *(bank.block for bank in self.banks.values())]

    def _pool(self) -> None:
        """Move all blocks into one pool, in the order of `blocks`; due whenever a row has come or gone."""
        self.pool = Pool.of(self.blocks)
        self.host, *blocks = self.pool.blocks
        banks = zip(self.banks.items(), blocks, strict=True)
        self.banks = {key: replace(bank, block=block) for (key, bank), block in banks}

    def slots_of_layout(self, layout: Layout) -> NDArray[np.bool_]:
        """Bool ``[E, S]``: whether the slot's features have this layout."""
        return np.tile([site.layout is layout for site in self.execution.sites], (self.size, 1))

    def parameters_in(self, counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """``[E]``: live parameters of the seeds in the slots ``counted``, bool ``[E, S]``."""
        blueprint = np.maximum(self.table.blueprint, 0).astype(np.int64)
        cost = np.take_along_axis(self.seed_parameters, blueprint[..., None], axis=2)[..., 0]
        return (cost * (counted & self.table.owning)).sum(axis=1)


def seed_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a seed's first weights: a function of its network, slot and number of earlier seeds there."""
    word = np.random.SeedSequence((network_seed, slot, tries)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))


def _keys(transitions: Transitions, chosen: NDArray[np.bool_]) -> list[BankKey]:
    pairs = zip(transitions.slot[chosen].tolist(), transitions.blueprint[chosen].tolist(), strict=True)
    return sorted(set(pairs))


def _at(transitions: Transitions, key: BankKey) -> NDArray[np.bool_]:
    return (transitions.slot == key[0]) & (transitions.blueprint == key[1])


def _forgotten(evidence: Evidence, transitions: Transitions) -> Evidence:
    """Evidence without what was known of seeds that have just come or gone."""
    changed = (transitions.after == Stage.GERMINATED) | (transitions.after == Stage.PRUNED)
    return _without_evidence(evidence, (transitions.env[changed], transitions.slot[changed]))


def _without_evidence(evidence: Evidence, where: tuple[NDArray[np.int64], NDArray[np.int64] | slice]) -> Evidence:
    forgotten = np.zeros(evidence.probed.shape, np.bool_)
    forgotten[where] = True
    return Evidence(
        probed=evidence.probed & ~forgotten,
        gradient_healthy=evidence.gradient_healthy & ~forgotten,
        contribution=np.where(forgotten, np.float32(np.nan), evidence.contribution),
        contribution_age=np.where(forgotten, np.int16(0), evidence.contribution_age),
    )
