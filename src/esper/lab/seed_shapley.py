"""What the seeds that were kept in episodes earned: Shapley values, by network, by blueprint and by pairs of slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from esper.lab.analysis import Interval, mean_interval
from esper.population.forward import select_committed
from esper.population.shapley import ACCURACY, LOSS, Attribution, attribute_networks
from esper.rl.episodes import Episodes

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
    """What the kept seeds of finished episodes earned on the validation data of their last phase.

    What is only reported needs no test data.
    """
    population = episodes.population
    rng = np.random.default_rng(_ORDERS)
    found = attribute_networks(population, episodes.validation, rng, select_committed(population))
    return [_earnings(episodes, found, row) for row in range(episodes.size)]


def _earnings(episodes: Episodes, found: Attribution, row: int) -> SeedShapley:
    instance = episodes.instances[row]
    blueprints: list[int] = episodes.population.table.blueprint[row].tolist()
    slots: list[int] = np.flatnonzero(found.players[row]).tolist()
    suite = episodes.suite
    about, unit = (ACCURACY, 1.0) if suite.objective == "accuracy" else (LOSS, suite.chance_loss)
    values, errors = found.values[about, row] / unit, found.errors[about, row] / unit
    interactions = found.interactions[about, row] / unit
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
    episodes: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for one in found:
        for blueprint in {seed.blueprint for seed in one.seeds}:
            values = [seed.value for seed in one.seeds if seed.blueprint == blueprint]
            episodes[blueprint].append((one.family, values))
    summed: list[BlueprintShapley] = []
    for blueprint, own in episodes.items():
        seeds = np.concatenate([values for _, values in own])
        # Episode by episode: the seeds of one network are not independent.
        mean, interval = _average([(family, float(np.mean(values))) for family, values in own])
        negative = float((seeds < 0).mean())
        summed.append(BlueprintShapley(blueprint, len(seeds), len(own), mean, interval, negative))
    return sorted(summed, key=lambda one: (-one.kept, one.blueprint))


def summarise_pairs(found: Sequence[SeedShapley]) -> list[PairInteraction]:
    """By pair of slots, in order."""
    interactions: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    for one in found:
        for pair in one.pairs:
            interactions[pair.first, pair.second].append((one.family, pair.interaction))
    return [PairInteraction(*slots, len(own), *_average(own)) for slots, own in sorted(interactions.items())]


def _average(episodes: Sequence[tuple[str, float]]) -> tuple[float, Interval | None]:
    """The mean over episodes, each with its family, and where it lies."""
    families, values = zip(*episodes, strict=True)
    if len(values) < FEWEST_EPISODES:
        return float(np.mean(values)), None
    found = mean_interval(np.array([values]), families)
    return found.estimate, found
