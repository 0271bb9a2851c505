"""Who is in a population: its networks as they were given, and what their widths imply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.growth.blueprints.registry import Blueprint
from esper.growth.site import Site
from esper.training.budget import Costs

Fossils = tuple[tuple[int, int], ...]
"""Slot and blueprint indices of finished seeds."""


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
        """What each blueprint would cost in each slot."""
        return self._catalogue[0]

    @property
    def compatible(self) -> NDArray[np.bool_]:
        """Whether a blueprint serves a slot, ``[E, S, K]``."""
        return self._catalogue[1]

    @cached_property
    def _catalogue(self) -> tuple[Costs, NDArray[np.bool_]]:
        shape = (len(self.networks), len(self.sites), len(self.kinds))
        parameters, flops, serves = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        known: dict[tuple[int, int, int], tuple[int, int, bool]] = {}
        for environment, network in enumerate(self.networks):
            for slot, width in enumerate(network.widths):
                for index in range(len(self.kinds)):
                    key = (slot, width, index)
                    if key not in known:
                        known[key] = _cost(self.kinds[index], self.sites[slot].narrowed(width))
                    place = (environment, slot, index)
                    parameters[place], flops[place], serves[place] = known[key]
        return Costs(parameters, flops, parameters * self.bytes_per_parameter), serves

    def replaced(self, rows: Sequence[int], networks: Sequence[Network]) -> Roster:
        """The roster with other networks at ``rows``."""
        changed = list(self.networks)
        for row, network in zip(rows, networks, strict=True):
            changed[row] = network
        return replace(self, networks=changed)

    def new_seed(self, network: int, slot: int, blueprint: int, tries: int) -> Blueprint:
        """A fresh seed; ``tries`` counts the earlier seeds of that slot.

        Whatever the blueprint's constructor raises passes through.
        """
        owner = self.networks[network]
        site = self.sites[slot].narrowed(owner.widths[slot])
        return self.kinds[blueprint](site, seed_generator(owner.seed, slot, tries))


def _cost(kind: type[Blueprint], site: Site) -> tuple[int, int, bool]:
    return (kind.parameters_at(site), kind.flops_at(site), True) if kind.serves(site) else (0, 0, False)


def seed_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a seed's first weights: a function of its network, slot and number of earlier seeds there."""
    word = np.random.SeedSequence((network_seed, slot, tries)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))
