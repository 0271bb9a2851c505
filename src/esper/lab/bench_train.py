"""Where the time of training a controller goes: one iteration after the other, in this process and one thread."""

from __future__ import annotations

import cProfile
import inspect
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from types import FunctionType
from typing import Any, cast

from esper.control.policy import Policy
from esper.engine.observation import observe
from esper.population.evaluation import evaluate_committed, start_evaluation
from esper.population.learning import TrainingStream, start_training
from esper.population.optimizers import clip_by_network, optimizer_step
from esper.population.population import Population
from esper.population.promise import PromiseMeter
from esper.rl.episodes import Episodes
from esper.rl.ppo import PPO
from esper.rl.rewards import RewardTracker
from esper.rl.rollout import concatenate_rollouts
from esper.runs.store import encode_events
from esper.train.collect import ShardTask, collect_rollout, create_policy
from esper.train.settings import TrainSettings
from esper.train.workers import Shared, prepare_process

PARTS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "hosts and seeds": (start_training,),
    "optimizers": (optimizer_step, clip_by_network),
    "validation and counterfactuals": (start_evaluation, evaluate_committed),
    "what blueprints promise": (PromiseMeter.measure,),
    "minibatches": (TrainingStream.draw_batches,),
    "lifecycle": (Population.decide, Episodes.legal_actions),
    "rewards": (RewardTracker.record,),
    "observations": (observe,),
    "policy": (Policy.act,),
    "events": (encode_events,),
    "update": (PPO.update,),
}
"""The functions that a part's time is spent in. Optimizers work within training and are taken out of it."""
REST = "rest"


@dataclass(frozen=True)
class TrainBenchmark:
    """How fast a controller is trained."""

    env_steps_per_second: float
    """Decisions of all networks over wall time, updates included: the median over iterations, without the profiler."""
    iterations: list[float]
    """Environment steps per second of each iteration."""
    share: dict[str, float]
    """Of the time of one more iteration under the profiler, whose own cost falls on parts with many small calls."""


def bench_train(settings: TrainSettings, report: Callable[[int, float], None]) -> TrainBenchmark:
    """Train for the settings' iterations and profile one more; ``report`` hears of each one's steps a second.

    The first iteration warms up and is not counted, if there are others.
    """
    prepare_process()
    learner = PPO(create_policy(settings), settings.ppo, settings.seed)
    speeds: list[float] = []
    for number in range(settings.iterations):
        began = time.perf_counter()
        steps = _iterate(settings, learner, number)
        speeds.append(steps / (time.perf_counter() - began))
        report(number + 1, speeds[-1])
    profile = cProfile.Profile()
    profile.runcall(_iterate, settings, learner, settings.iterations)
    return TrainBenchmark(median(speeds[1:] or speeds), speeds, shares(profile))


def _iterate(settings: TrainSettings, learner: PPO, number: int) -> int:
    """An iteration without store, probes and checkpoints; its decisions."""
    weights: Shared[dict[str, Any]] = Shared(learner.policy.state_dict())
    tasks = [ShardTask(settings, number, shard, weights) for shard in range(settings.shards)]
    shards = [collect_rollout(task) for task in tasks]
    learner.update(concatenate_rollouts([shard.rollout for shard in shards]), number / (settings.iterations + 1))
    return sum(int(running.sum()) for shard in shards for running in shard.log.running)


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Each part's share of all time that was profiled; they add up to 1."""
    stats = cast("dict[tuple[str, int, str], tuple[int, int, float, float, Any]]", vars(pstats.Stats(profile))["stats"])
    total = sum(own for _, _, own, _, _ in stats.values())
    spent = {name: sum(_cumulative(stats, function) for function in functions) for name, functions in PARTS.items()}
    spent["hosts and seeds"] -= spent["optimizers"]
    spent[REST] = total - sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


def _cumulative(stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, Any]], function: Any) -> float:
    """Seconds in a function and in all that it called."""
    code = cast("FunctionType", inspect.unwrap(function)).__code__  # what decorators such as no_grad hide
    row = stats.get((code.co_filename, code.co_firstlineno, code.co_name))
    return 0.0 if row is None else row[3]
