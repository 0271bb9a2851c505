"""What crosses the network per rollout when Ray computes it: the bytes of tasks, weights, results and events, pickled.

    python benchmarks/ray_traffic.py [KEY=VALUE ...]

The settings are those of `esper train` (for instance environments=64); one shard is collected in this process.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence

from esper.config import load_settings
from esper.experiments.collect import ShardTask, collect, new_policy
from esper.experiments.crew import exhausted
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import Given, use_one_thread
from esper.tasks.registry import get_suite


def size(value: object) -> int:
    return len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(overrides: Sequence[str]) -> None:
    use_one_thread()
    settings = load_settings(TrainSettings, None, overrides)
    weights = new_policy(settings).state_dict()
    # Weights go to each machine once, by reference; a task holds but the reference, here an empty value.
    task, said = ShardTask(settings, 0, 0, Given({})), list[int]()
    result = exhausted(collect(ShardTask(settings, 0, 0, Given(weights))), lambda told: said.append(size(told)))
    shards, steps = settings.shards, get_suite(settings.suite).steps
    rows = (
        ("task, per shard", size(task), shards),
        ("weights, per machine", size(weights), 1),
        ("result, per shard", size(result), shards),
        ("  of it the rollout", size(result.rollout), shards),
        ("events, per shard", sum(said), shards),
    )
    say(f"{settings.environments} environments in {shards} shards, {steps} decisions each")
    for name, count, times in rows:
        say(f"{name:<22} {count / 2**10:10,.1f} KiB   x {times} = {count * times / 2**20:8.2f} MiB per rollout")
    say(f"{'messages, per shard':<22} {len(said):10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
