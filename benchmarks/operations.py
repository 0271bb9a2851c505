"""What a decision of a whole population costs: by torch operation, by number of networks, and at the very least.

    python benchmarks/operations.py [environments=128] [KEY=VALUE ...]

The controller acts at random; the policy and its update are not in it. Settings are those of `esper train --set`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from esper.config.loading import load_settings
from esper.control.rules import Uniform
from esper.train.evaluation import make_evaluation_config
from esper.train.settings import TrainSettings
from esper.train.trainer import sample_instances
from esper.train.workers import prepare_process

LEAD = 8
"""Decisions before anything is measured, so that seeds are there."""
DECISIONS = 5
LISTED = 12
SIDE = 512
"""Of the square matrices whose product shows what the processor can do."""


@dataclass(frozen=True)
class Operation:
    """One torch operation in a decision of all networks and the training and validation after it."""

    name: str
    calls: float
    milliseconds: float
    share: float
    """Of the time of all operations."""


@dataclass(frozen=True)
class Costs:
    """What networks cost, all in seconds but the last."""

    fixed: float
    """The part of a decision's time that does not depend on how many networks there are."""
    each: float
    """What each network adds."""
    flops: float
    """Of matrix products and convolutions of a decision of one network, backward passes included."""


def measure_costs(players: Sequence[Player]) -> Costs:
    """Let players with different numbers of networks, the last one with most, decide in turns."""
    seconds: list[list[float]] = [[] for _ in players]
    for _ in range(DECISIONS):
        for own, player in zip(seconds, players, strict=True):
            own.append(timed(player.decide))
    each, fixed = np.polyfit([player.size for player in players], [median(own) for own in seconds], 1)
    with FlopCounterMode(display=False) as counter:
        players[-1].decide()
    return Costs(float(fixed), float(each), counter.get_total_flops() / players[-1].size)


class Player:
    """Episodes that a random controller plays."""

    def __init__(self, settings: TrainSettings, size: int) -> None:
        self.size = size
        instances = sample_instances(settings, 0, 0)[:: settings.environments // size][:size]
        self._episodes = make_evaluation_config(settings).create_episodes(instances)
        self._controller = Uniform()
        self._state = self._controller.start([settings.seed + network for network in range(size)])
        for _ in range(LEAD):
            self.decide()

    def decide(self) -> None:
        episodes = self._episodes
        actions, self._state = self._controller.act(episodes.observe(), episodes.legal_actions(), self._state)
        episodes.step(actions)


def profile_operations(player: Player) -> list[Operation]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(DECISIONS):
            player.decide()
    operations = cast("Sequence[Any]", profiled.key_averages())
    total = sum(operation.self_cpu_time_total for operation in operations)
    dearest = sorted(operations, key=lambda operation: -operation.self_cpu_time_total)[:LISTED]
    return [
        Operation(
            one.key,
            one.count / DECISIONS,
            one.self_cpu_time_total / DECISIONS / 1e3,
            one.self_cpu_time_total / total,
        )
        for one in dearest
    ]


def matmul_rate() -> float:
    """Floating-point operations a second of a large product: the best of several."""
    left = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    seconds = [timed(lambda: torch.mm(left, left)) for _ in range(20)]
    return 2 * SIDE**3 / min(seconds)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a setting of `esper train`")
    overrides: list[str] = parser.parse_args().overrides
    prepare_process()
    settings = load_settings(TrainSettings, None, ("shards=1", *overrides))
    players = [Player(settings, max(settings.environments // part, 1)) for part in (4, 2, 1)]
    costs, rate = measure_costs(players), matmul_rate()
    sys.stdout.write(f"{'operation':<40}{'calls a decision':>18}{'ms a decision':>16}{'share':>8}\n")
    for one in profile_operations(players[-1]):
        sys.stdout.write(f"{one.name:<40}{one.calls:>18.0f}{one.milliseconds:>16.1f}{one.share:>8.1%}\n")
    sys.stdout.write(
        f"a decision with its training and validation: {1e3 * costs.fixed:.0f} ms however many networks, and "
        f"{1e3 * costs.each:.2f} ms for each: at most {1 / costs.each:.0f} environment steps per second\n"
        f"matrix products: {costs.flops / 1e6:.1f} MFLOP an environment step; at the {rate / 1e9:.0f} GFLOP/s of a "
        f"large one, {rate / costs.flops:.0f} environment steps per second\n"
    )


if __name__ == "__main__":
    main()
