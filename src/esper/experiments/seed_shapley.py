"""What the seeds that were kept in episodes earned: Shapley values, by network, by blueprint and by pairs of slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from esper.experiments.analysis import Interval, mean_interval
from esper.rl.episodes import Episodes
from esper.training.forward import select_committed
from esper.training.shapley import ACCURACY, Attribution, attribute_networks

_ORDERS = 0
"""Seed of the orders that are drawn where a network has kept too many seeds for all coalitions."""


@dataclass(frozen=True)
class SeedValue:
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
class SeedShapley:
    """What the fossils of one episode earned."""

    instance: str
    family: str
    seeds: tuple[SeedValue, ...]
    pairs: tuple[KeptPair, ...]
    """None where values are estimates."""


def attribute_kept_seeds(episodes: Episodes) -> list[SeedShapley]:
    """Of finished episodes, each on the validation data of its last phase: what is only reported needs no test data."""
    population = episodes.population
    rng = np.random.default_rng(_ORDERS)
    found = attribute_networks(population, episodes.validation, rng, select_committed(population))
    return [_earnings(episodes, found, row) for row in range(episodes.size)]


def _earnings(episodes: Episodes, found: Attribution, row: int) -> SeedShapley:
    instance = episodes.instances[row]
    blueprints: list[int] = episodes.population.table.blueprint[row].tolist()
    slots: list[int] = np.flatnonzero(found.players[row]).tolist()
    values, errors = found.values[ACCURACY, row], found.errors[ACCURACY, row]
    interactions = found.interactions[ACCURACY, row]
    seeds = [
        SeedValue(slot, episodes.suite.blueprints[blueprints[slot]], float(values[slot]), float(errors[slot]))
        for slot in slots
    ]
    pairs = [
        KeptPair(first, second, float(interactions[first, second]))
        for first, second in combinations(slots, 2)
        if np.isfinite(interactions[first, second])
    ]
    return SeedShapley(instance.name, instance.family, tuple(seeds), tuple(pairs))


FEWEST_EPISODES = 8
"""For an interval: fewer values say little of how much they vary."""


@dataclass(frozen=True)
class BlueprintShapley:
    """The kept seeds of one blueprint."""

    blueprint: str
    kept: int
    """Seeds."""
    episodes: int
    """In which at least one was kept."""
    value: float
    """Mean Shapley value of a seed, in accuracy, over those episodes."""
    interval: Interval | None
    """Of the mean; None for fewer than `FEWEST_EPISODES`."""
    negative: float
    """Share of the seeds with a value below 0."""


@dataclass(frozen=True)
class PairInteraction:
    """The episodes that kept seeds in both of two slots."""

    first: int
    second: int
    episodes: int
    interaction: float
    """Mean over those episodes, in accuracy."""
    interval: Interval | None
    """Of the mean; None for fewer than `FEWEST_EPISODES`."""


def summarise_blueprints(found: Sequence[SeedShapley]) -> list[BlueprintShapley]:
    """By blueprint, those kept most often first."""
    by_blueprint: dict[str, list[list[float]]] = defaultdict(list)
    families: dict[str, list[str]] = defaultdict(list)
    for one in found:
        for blueprint in dict.fromkeys(seed.blueprint for seed in one.seeds):
            by_blueprint[blueprint].append([seed.value for seed in one.seeds if seed.blueprint == blueprint])
            families[blueprint].append(one.family)
    summed = [_earner(blueprint, values, families[blueprint]) for blueprint, values in by_blueprint.items()]
    return sorted(summed, key=lambda one: (-one.kept, one.blueprint))


def _earner(blueprint: str, values: Sequence[Sequence[float]], families: Sequence[str]) -> BlueprintShapley:
    """From the values of its seeds episode by episode: those of one network are not independent."""
    seeds = np.concatenate(values)
    means = [float(np.mean(own)) for own in values]
    return BlueprintShapley(blueprint, len(seeds), len(values), *_mean(means, families), float((seeds < 0).mean()))


def summarise_pairs(found: Sequence[SeedShapley]) -> list[PairInteraction]:
    """By pair of slots, in order."""
    interactions: dict[tuple[int, int], list[float]] = defaultdict(list)
    families: dict[tuple[int, int], list[str]] = defaultdict(list)
    for one in found:
        for pair in one.pairs:
            slots = pair.first, pair.second
            interactions[slots].append(pair.interaction)
            families[slots].append(one.family)
    return [
        PairInteraction(*slots, len(interactions[slots]), *_mean(interactions[slots], families[slots]))
        for slots in sorted(interactions)
    ]


def _mean(values: Sequence[float], families: Sequence[str]) -> tuple[float, Interval | None]:
    if len(values) < FEWEST_EPISODES:
        return float(np.mean(values)), None
    found = mean_interval(np.array([values]), families)
    return found.estimate, found
