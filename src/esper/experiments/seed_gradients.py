"""How the gradients of seeds stood beside those of the networks they grew in, over their lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions
from esper.training.gradients import HealthTable, SeedHealth


@dataclass(frozen=True)
class SeedGradients:
    """The gradients of one seed, as means over the decisions after which it learned; fields as in `SeedHealth`."""

    environment: int
    slot: int
    blueprint: str
    decisions: int
    """How many there were, one at least."""
    vanished: float
    exploded: float
    ratio: float | None
    """None if it was never known."""


@dataclass(frozen=True)
class BlueprintGradients:
    """The gradients of all seeds of one blueprint."""

    blueprint: str
    seeds: int
    vanished: float
    """Mean over the seeds."""
    exploded: float
    """Mean over the seeds."""
    ratio: float | None
    """Median over the seeds; None if no seed's is known."""


def seed_gradients(
    blueprints: Sequence[str], changes: Sequence[Transitions], health: Sequence[HealthTable]
) -> list[SeedGradients]:
    """Every seed that learned, from the transitions of each decision and the health ``[E, S]`` after it."""
    births: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for step, change in enumerate(changes):
        for index in np.flatnonzero(change.after == Stage.GERMINATED).tolist():
            place = int(change.env[index]), int(change.slot[index])
            births[place].append((step, blueprints[int(change.blueprint[index])]))
    found: list[SeedGradients] = []
    for place, own in sorted(births.items()):
        ends = [*(step for step, _ in own[1:]), len(health)]
        for (start, blueprint), end in zip(own, ends, strict=True):
            learned = [one for table in health[start:end] if (one := table.at(*place)).minibatches]
            if learned:
                found.append(_over(learned, place, blueprint))
    return found


def _over(life: Sequence[SeedHealth], place: tuple[int, int], blueprint: str) -> SeedGradients:
    ratios = [one.ratio for one in life if np.isfinite(one.ratio)]
    return SeedGradients(
        *place,
        blueprint,
        len(life),
        float(np.mean([one.vanished for one in life])),
        float(np.mean([one.exploded for one in life])),
        float(np.mean(ratios)) if ratios else None,
    )


def by_blueprint(found: Sequence[SeedGradients]) -> list[BlueprintGradients]:
    """In the order of the blueprints' names."""
    own: dict[str, list[SeedGradients]] = defaultdict(list)
    for one in found:
        own[one.blueprint].append(one)
    return [_summed(blueprint, seeds) for blueprint, seeds in sorted(own.items())]


def _summed(blueprint: str, seeds: Sequence[SeedGradients]) -> BlueprintGradients:
    ratios = [seed.ratio for seed in seeds if seed.ratio is not None]
    return BlueprintGradients(
        blueprint,
        len(seeds),
        float(np.mean([seed.vanished for seed in seeds])),
        float(np.mean([seed.exploded for seed in seeds])),
        float(np.median(ratios)) if ratios else None,
    )
