"""What kept seeds earned over many episodes: by blueprint, and by pairs of slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.experiments.analysis import mean_interval
from esper.experiments.earnings import Earnings
from esper.experiments.statistics import Interval

FEWEST_EPISODES = 8
"""For an interval: fewer values say little of how much they vary."""


@dataclass(frozen=True)
class Earner:
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
class Together:
    """The episodes that kept seeds in both of two slots."""

    first: int
    second: int
    episodes: int
    interaction: float
    """Mean over those episodes, in accuracy."""
    interval: Interval | None
    """Of the mean; None for fewer than `FEWEST_EPISODES`."""


def earners(found: Sequence[Earnings]) -> list[Earner]:
    """By blueprint, those kept most often first."""
    by_blueprint: dict[str, list[list[float]]] = defaultdict(list)
    families: dict[str, list[str]] = defaultdict(list)
    for one in found:
        for blueprint in dict.fromkeys(seed.blueprint for seed in one.seeds):
            by_blueprint[blueprint].append([seed.value for seed in one.seeds if seed.blueprint == blueprint])
            families[blueprint].append(one.family)
    summed = [_earner(blueprint, values, families[blueprint]) for blueprint, values in by_blueprint.items()]
    return sorted(summed, key=lambda one: (-one.kept, one.blueprint))


def _earner(blueprint: str, values: Sequence[Sequence[float]], families: Sequence[str]) -> Earner:
    """From the values of its seeds episode by episode: those of one network are not independent."""
    seeds = np.concatenate(values)
    means = [float(np.mean(own)) for own in values]
    return Earner(blueprint, len(seeds), len(values), *_mean(means, families), float((seeds < 0).mean()))


def together(found: Sequence[Earnings]) -> list[Together]:
    """By pair of slots, in order."""
    interactions: dict[tuple[int, int], list[float]] = defaultdict(list)
    families: dict[tuple[int, int], list[str]] = defaultdict(list)
    for one in found:
        for pair in one.pairs:
            slots = pair.first, pair.second
            interactions[slots].append(pair.interaction)
            families[slots].append(one.family)
    return [
        Together(*slots, len(interactions[slots]), *_mean(interactions[slots], families[slots]))
        for slots in sorted(interactions)
    ]


def _mean(values: Sequence[float], families: Sequence[str]) -> tuple[float, Interval | None]:
    if len(values) < FEWEST_EPISODES:
        return float(np.mean(values)), None
    found = mean_interval(np.array([values]), families)
    return found.estimate, found
