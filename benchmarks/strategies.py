"""How fast populations train by each strategy, on six kinds of hosts, and how far that is from what the device can do.

    python benchmarks/strategies.py [--hosts mlp conv8 conv32 images transformer language] [--environments 1 4 16 64]
        [--device cuda]

Strategies take turns of a few minibatches, forward, backward and optimizer; printed are medians for one minibatch and,
beside them, how many times as fast as `looped` a strategy was in the same round (and from least to most). The floor is
the longer one of two times: floating-point operations over the rate of a large matrix product here, and bytes moved at
least over the rate of a large copy here. At least means: values are read in both passes; they, gradients and moments
are read and written by the optimizer; what the forward pass keeps for the backward pass is written and read once. One
thread, float32.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from zoo.hosts import TransformerBlock

from esper.population.learning import Batch, train
from esper.population.population import STRATEGIES, NetworkSpec, Population, PopulationConfig, Strategy
from esper.tasks import image_files
from esper.tasks.image_files import FIVE, PhotoHost
from esper.tasks.language_suite import FULL
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process
from population import now

BATCH = 32
CLASSES = 10
MINIBATCHES = 4
"""In a turn."""
TRANSFERS_PER_VALUE = 2 + 8
"""Of a parameter's number: read in either pass; value, gradient and two moments read and written by AdamW."""
TRANSFERS_PER_ACTIVATION = 2
MATRIX = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrix product that measures a device's rate."""
COPIED = {"cpu": 2**26, "cuda": 2**30}
"""Bytes of the copy that measures its bandwidth."""
PROBES = 5


class Host(NamedTuple):
    """A host and its data."""

    module: nn.Module
    input_shape: tuple[int, ...]
    slot: str = "body"
    width: int = 1
    classes: int = CLASSES
    label_shape: tuple[int, ...] = ()


class Mean(nn.Module):
    """Over the tokens ``[B, T, D]``."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(-2)


def host(body: nn.Module, *head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict([("body", body), ("head", nn.Sequential(*head))]))


def mlp() -> Host:
    body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return Host(host(body, nn.Linear(256, CLASSES)), (64,))


def conv8() -> Host:
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
    return Host(host(body, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(32, CLASSES)), (1, 8, 8))


def conv32() -> Host:
    widths, layers = (3, 16, 32, 64), list[nn.Module]()
    for stride, narrow, wide in zip((1, 2, 2), widths[:-1], widths[1:], strict=True):
        layers += [nn.Conv2d(narrow, wide, 3, stride, padding=1), nn.ReLU()]
    body = nn.Sequential(*layers)
    return Host(host(body, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, CLASSES)), (3, 32, 32))


def images() -> Host:
    """That of the suites on photographs, with five stages."""
    *stages, head = PhotoHost(3, image_files.FULL, CLASSES, FIVE, torch.Generator().manual_seed(0)).children()
    return Host(host(nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head), (3, 32, 32))


def transformer() -> Host:
    blocks = [TransformerBlock(64, 4) for _ in range(2)]
    return Host(host(nn.Sequential(nn.Linear(16, 64), *blocks), Mean(), nn.Linear(64, CLASSES)), (32, 16))


def language() -> Host:
    """The widest host of that suite, which is `Stackable`."""
    suite = get_suite("language")
    template = suite.template()
    return Host(template, suite.input_shape, suite.sites[0], FULL.width, suite.classes, suite.label_shape)


HOSTS: dict[str, Callable[[], Host]] = {
    "mlp": mlp,
    "conv8": conv8,
    "conv32": conv32,
    "images": images,
    "transformer": transformer,
    "language": language,
}


@dataclass(frozen=True)
class Device:
    """What a device can do."""

    operations: float
    """Floating-point operations a second."""
    bandwidth: float
    """Bytes read and written a second."""


@dataclass(frozen=True)
class Needs:
    """Of one network's minibatch."""

    operations: float
    transferred: float
    """Bytes, at least."""

    def floor(self, networks: int, device: Device) -> float:
        """Seconds, at least."""
        return networks * max(self.operations / device.operations, self.transferred / device.bandwidth)


def examined(device: torch.device) -> Device:
    size, count = MATRIX[device.type], COPIED[device.type]
    matrix, block = torch.ones(size, size, device=device), torch.ones(count // 4, device=device)
    other = torch.empty_like(block)
    product = median(timed(lambda: matrix @ matrix, device) for _ in range(PROBES))
    copy = median(timed(lambda: other.copy_(block), device) for _ in range(PROBES))
    return Device(2 * size**3 / product, 2 * count / copy)


def timed(work: Callable[[], object], device: torch.device) -> float:
    began = now(device)
    work()
    return now(device) - began


def needs(name: str) -> Needs:
    """Counted on a single network."""
    host = HOSTS[name]()
    model, labels = host.module, torch.zeros(BATCH, *host.label_shape, dtype=torch.int64)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(model(torch.ones(BATCH, *host.input_shape)).flatten(0, -2), labels.flatten())
        loss.backward()
    values = sum(parameter.nbytes for parameter in model.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own)
    return Needs(counter.get_total_flops(), TRANSFERS_PER_VALUE * values + TRANSFERS_PER_ACTIVATION * activations)


class Experiment:
    """One size of one host's population."""

    def __init__(self, name: str, networks: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        model, shape, slot, width, classes, label_shape = HOSTS[name]()
        everyone = [NetworkSpec(model, (width,), 1e-3, seed) for seed in range(networks)]
        plan = PopulationConfig(model, (slot,), ("norm",), torch.zeros(2, *shape), device=device)
        self.population = Population(plan, everyone)
        self._device = device
        self._batch = Batch(
            torch.randn(networks, BATCH, *shape, generator=generator).to(device),
            torch.randint(classes, (networks, BATCH, *label_shape), generator=generator).to(device),
        )

    def turn(self, strategy: Strategy) -> float:
        """Seconds per minibatch."""
        self.population.strategy = strategy
        return timed(lambda: train(self.population, [self._batch] * MINIBATCHES), self._device) / MINIBATCHES


def measured(
    name: str, networks: int, device: torch.device, rounds: int, allowed: Sequence[Strategy]
) -> dict[Strategy, list[float]]:
    """Seconds of each turn, by strategy; none of one that the memory does not suffice for."""
    experiment = Experiment(name, networks, device)
    seconds: dict[Strategy, list[float]] = {strategy: [] for strategy in allowed}
    for number in range(1 + rounds):  # the first one warms up
        for strategy in allowed if number % 2 else allowed[::-1]:
            if strategy in seconds:
                try:
                    seconds[strategy].append(experiment.turn(strategy))
                except torch.OutOfMemoryError:
                    del seconds[strategy]
    return {strategy: own[1:] for strategy, own in seconds.items()}


def rows(name: str, arguments: argparse.Namespace, device: torch.device, limits: Device) -> None:
    """Print a host's part of the table."""
    need, each = needs(name), dict.fromkeys(STRATEGIES, 0.0)
    for networks in arguments.environments:
        # As long as a network took in the size before, at least in a loop.
        allowed = [one for one in STRATEGIES if each[one] * networks * MINIBATCHES <= arguments.most_seconds]
        measurements = measured(name, networks, device, arguments.rounds, allowed)
        floor = need.floor(networks, limits)
        for strategy in STRATEGIES:
            line = f"{name:<12}{networks:>8}  {strategy:<9}"
            if strategy not in measurements:
                say(f"{line} left out: too {'large for the memory' if strategy in allowed else 'slow'}")
                continue
            own, ratios = measurements[strategy], speedups(measurements, strategy)
            each[strategy] = median(own) / networks
            line += f"{1e3 * median(own):>12.2f}{ratios:>24}{1e3 * floor:>12.3f}{median(own) / floor:>8.0f}"
            say(line)


def speedups(measurements: dict[Strategy, list[float]], strategy: Strategy) -> str:
    if "looped" not in measurements:
        return ""
    ratios = [other / own for other, own in zip(measurements["looped"], measurements[strategy], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", nargs="+", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-seconds", type=float, default=3.0, help="of a turn; larger sizes are left out")
    arguments = parser.parse_args()
    prepare_process()
    device = torch.device(arguments.device)
    limits = examined(device)
    say(f"{device}: {limits.operations / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s; minibatches of {BATCH}")
    say(f"{'host':<12}{'networks':>8}  {'strategy':<9}{'ms':>12}{'times looped':>24}{'floor, ms':>12}{'floors':>8}")
    for name in arguments.hosts:
        rows(name, arguments, device, limits)


if __name__ == "__main__":
    main()
