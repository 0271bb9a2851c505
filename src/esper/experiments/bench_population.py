"""How fast populations train, beside a plain loop over separate modules that does the same work.

Both take the same random actions, train on the same minibatches and measure every seed's counterfactual on the same
data. They take turns of a few decisions each, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import cProfile
from dataclasses import dataclass
from statistics import median
from types import CodeType

import numpy as np
import torch

from esper.control.rules.simple import Uniform
from esper.experiments.bench_work import TRAINING, Stopwatch, Work, advance, advance_loop
from esper.experiments.open_rules import OPEN_RULES
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.training.learning import train
from esper.training.optimizers import clip_by_network, optimizer_step
from esper.training.population import Population, Strategy, StrategyChoice
from esper.training.reference import ReferencePopulation

LEAD = 6
"""Decisions taken without training before anything is timed, so that seeds are there."""
TURN = 3
"""Decisions that each side takes before it is the other's turn."""
_INSTANCE_STREAM = 21


@dataclass(frozen=True)
class BenchTask:
    """One size of one suite's population; any process may measure it."""

    suite: str
    environments: int
    repeats: int
    strategy: StrategyChoice
    device: str
    seed: int


@dataclass(frozen=True)
class BenchResult:
    """Environment steps per second, medians over the repeats. A step is one decision of one network."""

    suite: str
    environments: int
    strategy: Strategy
    """How the population was run."""
    population: float
    """Lifecycle, minibatches and evaluation of the population."""
    loop: float
    """The same work by separate modules with torch.optim, one network after the other."""
    ratio: float
    """Median of the repeats' ratios."""
    environment: float
    """The population's steps with all that an environment adds: data, observations, masks and rewards."""
    shares: dict[str, float]
    """Where the population's time goes, by part; they add up to 1."""


def bench_population(task: BenchTask) -> BenchResult:
    """Measure one size of one suite's population."""
    episodes, fresh = _episodes(task), _episodes(task)
    fast = episodes.population
    slow = ReferencePopulation(fast.config, fast.specs.networks)
    work = Work.drawn(episodes, LEAD + TURN * (1 + task.repeats), task.seed)
    for population in (fast, slow):
        for actions in work.script[:LEAD]:
            population.evidence = work.evidence
            population.decide(actions)
    device = torch.device(task.device)
    total, seconds, loop_seconds = Stopwatch(device), list[float](), list[float]()
    for start in range(LEAD, len(work.script), TURN):
        script = work.script[start : start + TURN]
        own, other = Stopwatch(device), Stopwatch(device)
        advance(fast, script, work, own)
        advance_loop(slow, script, work, other)
        if start == LEAD:
            continue  # The first turn warms up: memory is allocated and kernels are chosen.
        seconds.append(own.total)
        loop_seconds.append(other.total)
        total.add(own)
    steps = task.environments * TURN
    return BenchResult(
        task.suite,
        task.environments,
        fast.strategy,
        population=steps / median(seconds),
        loop=steps / median(loop_seconds),
        ratio=median(other / own for own, other in zip(seconds, loop_seconds, strict=True)),
        environment=steps / _environment_seconds(fresh, task),
        shares=_shares(total, _optimizer_share(fast, work)),
    )


def _episodes(task: BenchTask) -> Episodes:
    suite = get_suite(task.suite)
    instances = suite.sample(task.environments, "train", np.random.default_rng((task.seed, _INSTANCE_STREAM)))
    return Episodes(suite, instances, OPEN_RULES, strategy=task.strategy, device=torch.device(task.device))


def _environment_seconds(episodes: Episodes, task: BenchTask) -> float:
    """Median seconds of a turn of whole environment steps under a random controller, which is not timed itself."""
    controller = Uniform()
    state = controller.start([task.seed + network for network in range(episodes.size)])
    laps: list[float] = []
    for _ in range(LEAD + TURN * task.repeats):
        watch = Stopwatch(episodes.device)
        watch.start()
        observation, masks = episodes.observe(), episodes.legal_actions()
        watch.lap("observing")
        actions, state = controller.act(observation, masks, state)
        watch.start()
        episodes.step(actions)
        watch.lap("stepping")
        laps.append(watch.total)
    turns = [sum(laps[start : start + TURN]) for start in range(LEAD, len(laps), TURN)]
    return median(turns)


def _shares(watch: Stopwatch, optimizer_share: float) -> dict[str, float]:
    """Each part's share of all time, training split into gradients and optimizer."""
    shares = {part: seconds / watch.total for part, seconds in watch.seconds.items()}
    training = shares.pop(TRAINING)
    split = {"gradients": training * (1 - optimizer_share), "optimizer": training * optimizer_share}
    return {**split, **shares}


def _optimizer_share(population: Population, work: Work) -> float:
    """The optimizer's share of the time that training takes, by a profile of a turn's minibatches."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(TURN):
        train(population, work.batches)
    profile.disable()
    seconds: dict[CodeType | str, float] = {entry.code: entry.totaltime for entry in profile.getstats()}
    stepping = sum(seconds.get(function.__code__, 0.0) for function in (optimizer_step, clip_by_network))
    return stepping / seconds[train.__code__]
