"""What the seeds that were kept in an episode earned: their Shapley values in the committed network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from esper.rl.episodes import Episodes
from esper.training.forward import select_committed
from esper.training.shapley import ACCURACY, Attribution, attribute_networks

_ORDERS = 0
"""Seed of the orders that are drawn where a network has kept too many seeds for all coalitions."""


@dataclass(frozen=True)
class KeptSeed:
    """A fossil at the end of an episode."""

    slot: int
    blueprint: str
    value: float
    """Its Shapley value: its share of the accuracy on validation data that the fossils add to the host."""
    standard_error: float
    """0: the value is exact."""


@dataclass(frozen=True)
class KeptPair:
    """Two fossils of one network."""

    first: int
    """Slot; the lower one."""
    second: int
    interaction: float
    """Accuracy that both add beyond what each adds alone: positive where they help each other (Grabisch, Roubens)."""


@dataclass(frozen=True)
class Earnings:
    """What the fossils of one episode earned."""

    instance: str
    family: str
    seeds: tuple[KeptSeed, ...]
    pairs: tuple[KeptPair, ...]
    """None where values are estimates."""


def earnings(episodes: Episodes) -> list[Earnings]:
    """Of finished episodes, each on the validation data of its last phase: what is only reported needs no test data."""
    population = episodes.population
    rng = np.random.default_rng(_ORDERS)
    found = attribute_networks(population, episodes.validation, rng, select_committed(population))
    return [_earnings(episodes, found, row) for row in range(episodes.size)]


def _earnings(episodes: Episodes, found: Attribution, row: int) -> Earnings:
    instance = episodes.instances[row]
    blueprints: list[int] = episodes.population.table.blueprint[row].tolist()
    slots: list[int] = np.flatnonzero(found.players[row]).tolist()
    values, errors = found.values[ACCURACY, row], found.errors[ACCURACY, row]
    interactions = found.interactions[ACCURACY, row]
    seeds = [
        KeptSeed(slot, episodes.suite.blueprints[blueprints[slot]], float(values[slot]), float(errors[slot]))
        for slot in slots
    ]
    pairs = [
        KeptPair(first, second, float(interactions[first, second]))
        for first, second in combinations(slots, 2)
        if np.isfinite(interactions[first, second])
    ]
    return Earnings(instance.name, instance.family, tuple(seeds), tuple(pairs))
