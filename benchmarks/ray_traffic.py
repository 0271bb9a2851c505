"""What crosses the network per rollout when Ray computes it: the bytes of tasks, weights and results, pickled.

    python benchmarks/ray_traffic.py [KEY=VALUE ...]

The settings are those of `esper train` (for instance environments=64); one shard is collected in this process.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from esper.config.loading import load_settings
from esper.tasks.registry import get_suite
from esper.train.collect import ShardTask, collect_rollout, create_policy
from esper.train.settings import TrainSettings
from esper.train.workers import Shared, prepare_process


@dataclass(frozen=True)
class Sizes:
    """Bytes."""

    task: int
    """Per shard; the weights are not in it."""
    weights: int
    """Per machine."""
    result: int
    """Per shard: rollout, log and events."""
    rollout: int
    """Per shard."""
    events: int
    """Per shard."""


def sizes(settings: TrainSettings) -> Sizes:
    """Of the first rollout; computes one shard of it."""
    weights = create_policy(settings).state_dict()
    # Weights go to each machine once, by reference; a task holds but the reference, here an empty value.
    task = ShardTask(settings, 0, 0, Shared({}))
    result = collect_rollout(ShardTask(settings, 0, 0, Shared(weights)))
    return Sizes(_size(task), _size(weights), _size(result), _size(result.rollout), _size(result.events))


def _size(value: object) -> int:
    return len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(overrides: Sequence[str]) -> None:
    prepare_process()
    settings = load_settings(TrainSettings, None, overrides)
    found, shards = sizes(settings), settings.shards
    rows = (
        ("task, per shard", found.task, shards),
        ("weights, per machine", found.weights, 1),
        ("result, per shard", found.result, shards),
        ("  of it the rollout", found.rollout, shards),
        ("  of it the events", found.events, shards),
    )
    say(f"{settings.environments} environments in {shards} shards, {get_suite(settings.suite).steps} decisions each")
    for name, count, times in rows:
        say(f"{name:<22} {count / 2**10:10,.1f} KiB   x {times} = {count * times / 2**20:8.2f} MiB per rollout")


if __name__ == "__main__":
    main(sys.argv[1:])
