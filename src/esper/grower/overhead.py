"""What slots that nothing grows in add to the time of a training step, beside the same network without them.

The contestants take turns of a few steps, in an order that changes from turn to turn, so that whatever else the machine
does falls on all; each turn's times are compared with each other only. On a CPU the time is what the process spent
computing, in one thread, on an accelerator the time until its work is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower.grower import Grower
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.tasks.practice.hosts.resnet import WIDTHS, ResNet

PLACES = ("stem", "layer1", "layer2", "layer3")
CHANNELS, CLASSES, SIZE = 3, 10, 32
"""The images' channels, classes and side; they are square."""
LEARNING_RATE = 1e-3
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class OverheadTask:
    """How to measure."""

    repeats: int
    """Turns of each contestant."""
    steps: int
    """Training steps in a turn."""
    batch_size: int
    device: str
    seed: int


@dataclass(frozen=True)
class Overhead:
    """Added time over that of the bare network's training step: 0.01 is one per cent. Over the turns."""

    median: float
    lower: float
    """First quartile."""
    upper: float
    """Third quartile."""


@dataclass(frozen=True)
class OverheadResult:
    """Dormant slots, alone and with a grower that watches the optimizer's steps between its decisions."""

    slots: Overhead
    grower: Overhead
    step_seconds: float
    """Median time of the bare network's training step."""


class Contestant(NamedTuple):
    """A network in training."""

    network: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, images: Tensor, classes: Tensor, steps: int) -> None:
        """So many steps, on the same minibatch."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(images), classes).backward()
            self.optimizer.step()


def measure_overhead(task: OverheadTask) -> OverheadResult:
    """Let a bare network, one with dormant slots and one with a grower as well train in turns."""
    device = torch.device(task.device)
    generator = torch.Generator().manual_seed(task.seed)
    images = torch.randn(task.batch_size, CHANNELS, SIZE, SIZE, generator=generator).to(device)
    classes = torch.randint(CLASSES, (task.batch_size,), generator=generator).to(device)
    contestants = [_bare(device), _with_slots(images), _with_grower(images)]
    with _one_thread():
        for contestant in contestants:
            contestant.train(images, classes, task.steps)
        turns = [_turn(contestants, images, classes, task.steps, first) for first in range(task.repeats)]
    seconds = np.array(turns)
    ratios = seconds[:, 1:] / seconds[:, :1] - 1
    return OverheadResult(_spread(ratios[:, 0]), _spread(ratios[:, 1]), float(np.median(seconds[:, 0])) / task.steps)


def _turn(contestants: list[Contestant], images: Tensor, classes: Tensor, steps: int, first: int) -> list[float]:
    """Seconds of each contestant; another one begins in every turn."""
    seconds = [0.0] * len(contestants)
    for offset in range(len(contestants)):
        place = (first + offset) % len(contestants)
        start = _now(images.device)
        contestants[place].train(images, classes, steps)
        seconds[place] = _now(images.device) - start
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _network(device: torch.device) -> ResNet:
    return ResNet(CHANNELS, WIDTHS, CLASSES).to(device)


def _bare(device: torch.device) -> Contestant:
    network = _network(device)
    return Contestant(network, torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE))


def _with_slots(images: Tensor) -> Contestant:
    model = attach(_network(images.device), PLACES, images)
    return Contestant(model, torch.optim.AdamW(model.parameter_groups(lr=LEARNING_RATE)))


def _with_grower(images: Tensor) -> Contestant:
    contestant = _with_slots(images)
    assert isinstance(contestant.network, GrowingModel)
    Grower(contestant.network, contestant.optimizer, "none", evaluate=lambda _: (math.nan, math.nan))
    return contestant


def _spread(ratios: NDArray[np.float64]) -> Overhead:
    lower, median, upper = np.quantile(ratios, QUARTILES).tolist()
    return Overhead(median, lower, upper)


@contextmanager
def _one_thread() -> Generator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
