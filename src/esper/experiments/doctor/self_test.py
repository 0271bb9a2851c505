"""Does a stacked population do what the same networks do one after the other, and which is faster here?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from esper.experiments.bench_work import Stopwatch, Work, advance
from esper.experiments.open_rules import OPEN_RULES
from esper.experiments.process import prepare_process
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite, suite_names
from esper.training.population import STRATEGIES, Population, Strategy

NETWORKS = 16
DECISIONS = 8
WARM_UP = 3
"""Decisions before anything is timed."""
TOLERANCE = 1e-6
"""Of every parameter, in double precision: there rounding stays far below it, so it hides no mistake."""
_SEED = 0


@dataclass(frozen=True)
class SelfTest:
    """How the two ways of running the same networks compare on one device."""

    device: str
    networks: int
    seeds: int
    """That live at the end."""
    blended: int
    """Of those, seeds that count in their network's output."""
    difference: float | None
    """Largest difference of a parameter after training in double precision; None if it is not finite."""
    tolerance: float
    agrees: bool
    stacked_seconds: float
    """Of the same decisions in single precision, as training computes."""
    looped_seconds: float
    ratio: float
    """Looped seconds over stacked ones."""
    faster: Strategy


def self_test(device: torch.device) -> SelfTest:
    """Train the same networks with the same seeds and actions both ways, in one thread, as training does.

    Raises:
        RuntimeError: torch cannot compute on the device.
    """
    prepare_process()
    suite = get_suite(suite_names()[0])
    instances = suite.sample(NETWORKS, "train", np.random.default_rng(_SEED))
    episodes = Episodes(suite, instances, OPEN_RULES, device=device)
    work = Work.drawn(episodes, DECISIONS, _SEED)
    trained = {strategy: _trained(episodes, work, strategy) for strategy in STRATEGIES}
    looped = trained["looped"]
    difference = max(largest_difference(one, looped) for one in trained.values())
    seconds = {strategy: _seconds(episodes, work, strategy) for strategy in STRATEGIES}
    return SelfTest(
        str(device),
        NETWORKS,
        seeds=int(looped.table.owning.sum()),
        blended=int(looped.table.blended.sum()),
        difference=difference if np.isfinite(difference) else None,
        tolerance=TOLERANCE,
        agrees=difference <= TOLERANCE,
        stacked_seconds=seconds["stacked"],
        looped_seconds=seconds["looped"],
        ratio=seconds["looped"] / seconds["stacked"],
        faster=min(STRATEGIES, key=lambda strategy: seconds[strategy]),
    )


def largest_difference(left: Population, right: Population) -> float:
    """Of two populations' parameters, hosts and seeds; they had the same actions."""
    pairs = zip(left.flat.blocks, right.flat.blocks, strict=True)
    return torch.stack([(one.values - other.values).abs().amax() for one, other in pairs]).amax().item()


def _population(episodes: Episodes, strategy: Strategy, dtype: torch.dtype) -> Population:
    plan = replace(episodes.population.config, strategy=strategy, dtype=dtype)
    return Population(plan, episodes.population.specs.networks)


def _trained(episodes: Episodes, work: Work, strategy: Strategy) -> Population:
    population = _population(episodes, strategy, torch.float64)
    batches = [batch._replace(inputs=batch.inputs.double()) for batch in work.batches]
    validation = work.validation._replace(inputs=work.validation.inputs.double())
    precise = replace(work, batches=batches, validation=validation)
    advance(population, work.script, precise, Stopwatch(episodes.device))
    return population


def _seconds(episodes: Episodes, work: Work, strategy: Strategy) -> float:
    population, watch = _population(episodes, strategy, torch.float32), Stopwatch(episodes.device)
    advance(population, work.script[:WARM_UP], work, Stopwatch(episodes.device))
    advance(population, work.script[WARM_UP:], work, watch)
    return watch.total
