"""What slots that nothing grows in add to the time of a training step of a small ResNet, and what a grower adds.

    python benchmarks/attach.py [--repeats 400] [--steps 1] [--batch-size 16] [--device cuda]

The contestants take turns of a few steps, in an order that changes from turn to turn, so that whatever else the machine
does falls on all; each turn's times are compared with each other only. On a CPU the time is what the process spent
computing, in one thread, on an accelerator the time until its work is done.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.hosts import RESNET_WIDTHS, ResNet

from esper.grower.grower import Grower
from esper.growth.attach import attach

PLACES = ("stem", "layer1", "layer2", "layer3")
CHANNELS, CLASSES, SIZE = 3, 10, 32
"""Of the images, which are square."""
LEARNING_RATE = 1e-3


class Contestant(NamedTuple):
    """A network in training, always on the same minibatch."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    classes: Tensor

    def seconds(self, steps: int) -> float:
        """Of so many steps."""
        began = now(self.images.device)
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(self.images), self.classes).backward()
            self.optimizer.step()
        return now(self.images.device) - began


def now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def contestants(batch_size: int, device: torch.device) -> list[Contestant]:
    """The bare network, one with dormant slots, and one with a grower that watches the optimizer's steps as well."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, CHANNELS, SIZE, SIZE, generator=generator).to(device)
    classes = torch.randint(CLASSES, (batch_size,), generator=generator).to(device)

    def network() -> ResNet:
        return ResNet(CHANNELS, RESNET_WIDTHS, CLASSES).to(device)

    def with_slots() -> Contestant:
        model = attach(network(), PLACES, images)
        return Contestant(model, torch.optim.AdamW(model.parameter_groups(lr=LEARNING_RATE)), images, classes)

    bare, watched = network(), with_slots()
    Grower(watched.network, watched.optimizer, controller="none", evaluate=lambda _: (math.nan, math.nan))
    return [
        Contestant(bare, torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE), images, classes),
        with_slots(),
        watched,
    ]


def measured(repeats: int, steps: int, batch_size: int, device: torch.device) -> NDArray[np.float64]:
    """Seconds ``[repeats, contestants]`` of each turn."""
    everyone = contestants(batch_size, device)
    for contestant in everyone:
        contestant.seconds(steps)  # warms up
    seconds = np.zeros((repeats, len(everyone)))
    for turn in range(repeats):
        for offset in range(len(everyone)):
            place = (turn + offset) % len(everyone)
            seconds[turn, place] = everyone[place].seconds(steps)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=400, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=1, help="training steps in a turn")
    parser.add_argument("--batch-size", type=int, default=16, help="images of 32 x 32 pixels in a step")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measured(asked.repeats, asked.steps, asked.batch_size, asked.device)
    sys.stdout.write(f"training step without slots  {1e3 * np.median(seconds[:, 0]) / asked.steps:.2f} ms\n")
    for column, name in ((1, "dormant slots"), (2, "dormant slots and a grower")):
        low, middle, high = np.quantile(seconds[:, column] / seconds[:, 0] - 1, (0.25, 0.5, 0.75))
        sys.stdout.write(f"{name:<28} {middle:+.2%} (half of the turns between {low:+.2%} and {high:+.2%})\n")


if __name__ == "__main__":
    main()
