"""What crosses the network per rollout when Ray computes it: the bytes of tasks, weights and results, pickled.

    python benchmarks/ray_traffic.py [KEY=VALUE ...]

The settings are those of `esper train` (for instance environments=64); one shard is collected in this process.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from dataclasses import dataclass

from esper.config.loading import load_settings
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings
from esper.train.trainer import ShardTask, collect_rollout, create_policy
from esper.train.workers import Shared, prepare_process


@dataclass(frozen=True)
class Sizes:
    """Bytes that cross the network in a rollout."""

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


def measure_sizes(settings: TrainSettings) -> Sizes:
    """Of the first rollout; computes one shard of it."""
    weights = create_policy(settings).state_dict()
    # Weights go to each machine once, by reference; a task holds but the reference, here an empty value.
    task = ShardTask(settings, 0, 0, Shared({}))
    result = collect_rollout(ShardTask(settings, 0, 0, Shared(weights)))
    return Sizes(_size(task), _size(weights), _size(result), _size(result.rollout), _size(result.events))


def _size(value: object) -> int:
    return len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a setting of `esper train`")
    overrides: list[str] = parser.parse_args().overrides
    prepare_process()
    settings = load_settings(TrainSettings, None, overrides)
    sizes, shards = measure_sizes(settings), settings.shards
    rows = (
        ("task, per shard", sizes.task, shards),
        ("weights, per machine", sizes.weights, 1),
        ("result, per shard", sizes.result, shards),
        ("  of it the rollout", sizes.rollout, shards),
        ("  of it the events", sizes.events, shards),
    )
    write_line(
        f"{settings.environments} environments in {shards} shards, {get_suite(settings.suite).steps} decisions each"
    )
    for name, count, times in rows:
        write_line(f"{name:<22} {count / 2**10:10,.1f} KiB   x {times} = {count * times / 2**20:8.2f} MiB per rollout")


if __name__ == "__main__":
    main()
