"""How much faster rollouts become with more Ray workers, against a simple model of it.

    python benchmarks/ray_scaling.py [--workers 1 2] [--rounds 5] [KEY=VALUE ...]

The same rollout is collected with each number of workers in turns, side by side, so that whatever else the machine does
slows all of them; then the policy is updated from it in this process, which no number of workers makes faster. Model of
an iteration: update + collecting / N, for N up to the number of shards. What is measured beyond it is transport and
waiting for the slowest shard. KEY=VALUE are settings of `esper train`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

from esper.config.loading import load_settings
from esper.rl.ppo import PPO
from esper.rl.rollout import concatenate_rollouts
from esper.train.ray_workers import RayWorkers
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardResult, ShardTask, collect_rollout, create_policy


def collected(workers: RayWorkers, settings: TrainSettings, iteration: int) -> tuple[float, list[ShardResult]]:
    """Seconds, and the shards."""
    began = time.perf_counter()
    weights = workers.share(create_policy(settings).state_dict())
    tasks = [ShardTask(settings, iteration, shard, weights) for shard in range(settings.shards)]
    results = workers.map(collect_rollout, tasks)
    return time.perf_counter() - began, results


def updated(settings: TrainSettings, shards: Sequence[ShardResult]) -> float:
    """Seconds."""
    learner = PPO(create_policy(settings), settings.ppo, settings.seed)
    rollout = concatenate_rollouts([shard.rollout for shard in shards])
    began = time.perf_counter()
    learner.update(rollout, 0.0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    settings = load_settings(TrainSettings, None, asked.overrides)
    collecting: dict[int, list[float]] = {count: [] for count in asked.workers}
    updating: list[float] = []
    with RayWorkers(max(asked.workers)) as workers:
        collected(workers, settings, 0)  # its processes import torch now
        for number in range(asked.rounds):
            for count in asked.workers if number % 2 else asked.workers[::-1]:
                workers.max_tasks = count
                seconds, shards = collected(workers, settings, number)
                collecting[count].append(seconds)
            updating.append(updated(settings, shards))
    update, first = median(updating), asked.workers[0]
    lines = [f"{settings.environments} environments, {settings.shards} shards, {asked.rounds} rounds; medians"]
    lines.append(f"update in this process: {update:.2f} s; collecting with {first}: {median(collecting[first]):.2f} s")
    for count, seconds in collecting.items():
        ratios = [one / other for one, other in zip(collecting[first], seconds, strict=True)]
        share = min(count, settings.shards) / min(first, settings.shards)
        whole = update + median(collecting[first])
        found, model = whole / (update + median(seconds)), whole / (update + median(collecting[first]) / share)
        lines.append(
            f"workers {count}: collecting {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"an iteration {found:.2f} times (model {model:.2f})"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
