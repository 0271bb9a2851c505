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
from esper.growth.seed import blend_blueprint, count_blend_flops, count_blend_parameters
from esper.growth.site import Site
from esper.lifecycle.actions import Blend
from esper.training.bank import SeedModule
from esper.training.budget import Cost, Costs


class SeedKind(NamedTuple):
    """Which seeds have parameters of the same shapes, and are computed alike."""

    slot: int
    """An index, as is the blueprint."""
    blueprint: int
    blend: Blend = Blend.ADD


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
        return blend_blueprint(blueprint, site, kind.blend)


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
        np.array([count_blend_parameters(blend, site) for blend in Blend]),
        np.array([count_blend_flops(blend, site) for blend in Blend]),
    )


def seed_generator(network_seed: int, slot: int, tries: int) -> torch.Generator:
    """The generator of a seed's first weights: a function of its network, slot and number of earlier seeds there."""
    word = np.random.SeedSequence((network_seed, slot, tries)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))
