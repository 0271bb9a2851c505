"""What a decision of a whole population costs: by torch operation, by number of networks, and at the very least."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from esper.control.rules.simple import Uniform
from esper.experiments.collect import instances_of
from esper.experiments.evaluation import evaluation_config
from esper.experiments.settings import TrainSettings

LEAD = 8
"""Decisions before anything is measured, so that seeds are there."""
DECISIONS = 5
LISTED = 12
_SIDE = 512
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
class OperationsProfile:
    """What a decision costs under a controller that acts at random; the policy and its update are not in it."""

    operations: list[Operation]
    """The dearest ones, the dearest first."""
    fixed_milliseconds: float
    """The part of a decision's time that does not depend on how many networks there are."""
    milliseconds_per_network: float
    """What each network adds."""
    most_env_steps_per_second: float
    """1 / the latter: what no number of networks can exceed."""
    flops_per_env_step: float
    """Of matrix products and convolutions, backward passes included."""
    flops_per_second: float
    """Of one large matrix product on this machine."""
    arithmetic_env_steps_per_second: float
    """The latter over the former: if nothing but matrix products took time, and those at their best."""


def profile_operations(settings: TrainSettings) -> OperationsProfile:
    """Measure decisions of the settings' environments, and of a half and a quarter of them, in turns."""
    sizes = [max(settings.environments // part, 1) for part in (4, 2, 1)]
    players = [_Player(settings, size) for size in sizes]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(DECISIONS):
        for size, player in zip(sizes, players, strict=True):
            seconds[size].append(_timed(player.decide))
    each, fixed = np.polyfit(sizes, [median(seconds[size]) for size in sizes], 1)
    whole = players[-1]
    counter = FlopCounterMode(display=False)
    with counter:
        whole.decide()
    flops, rate = counter.get_total_flops() / sizes[-1], _matmul_rate()
    return OperationsProfile(
        _operations(whole),
        fixed_milliseconds=1e3 * float(fixed),
        milliseconds_per_network=1e3 * float(each),
        most_env_steps_per_second=1 / float(each),
        flops_per_env_step=flops,
        flops_per_second=rate,
        arithmetic_env_steps_per_second=rate / flops,
    )


class _Player:
    """Episodes that a random controller plays."""

    def __init__(self, settings: TrainSettings, size: int) -> None:
        instances = instances_of(settings, 0)[:: settings.environments // size][:size]
        self._episodes = evaluation_config(settings).episodes(instances)
        self._controller = Uniform()
        self._state = self._controller.start([settings.seed + network for network in range(size)])
        for _ in range(LEAD):
            self.decide()

    def decide(self) -> None:
        episodes = self._episodes
        actions, self._state = self._controller.act(episodes.observe(), episodes.legal_actions(), self._state)
        episodes.step(actions)


def _operations(player: _Player) -> list[Operation]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(DECISIONS):
            player.decide()
    found = cast("Sequence[Any]", profiled.key_averages())
    total = sum(one.self_cpu_time_total for one in found)
    dearest = sorted(found, key=lambda one: -one.self_cpu_time_total)[:LISTED]
    return [
        Operation(
            one.key,
            one.count / DECISIONS,
            one.self_cpu_time_total / DECISIONS / 1e3,
            one.self_cpu_time_total / total,
        )
        for one in dearest
    ]


def _matmul_rate() -> float:
    """Floating-point operations a second of a large product: the best of several."""
    left = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    seconds = [_timed(lambda: torch.mm(left, left)) for _ in range(20)]
    return 2 * _SIDE**3 / min(seconds)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
