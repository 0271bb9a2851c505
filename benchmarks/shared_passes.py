"""What measuring six seeds costs an epoch of ResNet-18, in shared passes and in separate ones.

    python benchmarks/shared_passes.py [--rounds 7] [--training 256] [--validation 64]

Every one of six slots holds a seed, and an epoch is a training pass, a validation, and one validation for each seed
that is due: all of them (``counterfactual_every`` 1, the default) or a third. Images are random, of 3 x 32 x 32. Both
kinds of passes take turns in one thread; figures are medians and quartiles of CPU time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import quantiles

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.grower.shared_forward import SharedForwardEvaluator
from esper.growth.model import GrowingModel
from esper.train.workers import prepare_process

CLASSES, WIDTH, BATCH = 10, 64, 64
SLOTS = ("layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0")
EVERY = (1, 3)
"""Decisions from one measurement of a seed to its next."""
RATIOS = (4, 5, 9)
"""Training images for each of validation; 5 are those of CIFAR-10."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.skip(x)).relu()


class ResNet18(nn.Module):
    """He et al. (2015), with a first layer for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.layer1 = nn.Sequential(BasicBlock(WIDTH, WIDTH, 1), BasicBlock(WIDTH, WIDTH, 1))
        self.layer2 = nn.Sequential(BasicBlock(WIDTH, 2 * WIDTH, 2), BasicBlock(2 * WIDTH, 2 * WIDTH, 1))
        self.layer3 = nn.Sequential(BasicBlock(2 * WIDTH, 4 * WIDTH, 2), BasicBlock(4 * WIDTH, 4 * WIDTH, 1))
        self.layer4 = nn.Sequential(BasicBlock(4 * WIDTH, 8 * WIDTH, 2), BasicBlock(8 * WIDTH, 8 * WIDTH, 1))
        self.fc = nn.Linear(8 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def grow_all() -> GrowingModel:
    """A seed that counts in every slot."""
    torch.manual_seed(0)
    model = esper.attach(ResNet18(), SLOTS, torch.randn(2, 3, 32, 32))
    for number, name in enumerate(SLOTS):
        seed = model.slots[name].germinate("conv3x3", torch.Generator().manual_seed(number), alpha=1.0)
        with torch.no_grad():
            for parameter in seed.parameters():
                parameter.add_(torch.randn(parameter.shape) / 100)
    return model


@dataclass(frozen=True)
class Options:
    rounds: int = 7
    training: int = 256
    """Training images."""
    validation: int = 64
    """Validation images."""


def measure_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def describe(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main(options: Options) -> None:
    prepare_process()
    model = grow_all()
    optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-2), momentum=0.9)
    images, labels = torch.randn(options.training, 3, 32, 32), torch.randint(CLASSES, (options.training,))
    held_out, answers = torch.randn(options.validation, 3, 32, 32), torch.randint(CLASSES, (options.validation,))

    def train() -> None:
        model.train()
        for inputs, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.inference_mode()
    def evaluate(model: GrowingModel) -> float:
        model.eval()
        pairs = zip(held_out.split(BATCH), answers.split(BATCH), strict=True)
        return sum(float(F.cross_entropy(model(inputs), targets, reduction="sum")) for inputs, targets in pairs)

    shared, separate = SharedForwardEvaluator(model), SharedForwardEvaluator(model)
    separate.fallback_reason = "for comparison"
    due = {every: [dict.fromkeys(SLOTS[turn::every], 0.0) for turn in range(every)] for every in EVERY}
    for changes in (one for turns in due.values() for one in turns):  # each set is verified once, which does not count
        if (
            shared.measure(evaluate, changes) != separate.measure(evaluate, changes)
            or shared.fallback_reason is not None
        ):
            raise SystemExit(f"passes were not shared: {shared.fallback_reason}")
    seconds: dict[str, list[float]] = {"training": [], "validation": []}
    for number in range(options.rounds):
        seconds["training"].append(measure_seconds(train))
        seconds["validation"].append(measure_seconds(lambda: evaluate(model)))
        for every in EVERY:
            for way in ("shared", "separate") if number % 2 else ("separate", "shared"):
                measure = partial(
                    (shared if way == "shared" else separate).measure, evaluate, due[every][number % every]
                )
                seconds.setdefault(f"{way} {every}", []).append(measure_seconds(measure))
        sys.stdout.write(f"round {number + 1} of {options.rounds}\n")
        sys.stdout.flush()
    trained = options.training / options.validation
    for every in EVERY:
        names = ("training", "validation", f"shared {every}", f"separate {every}")
        rows = list(zip(*(seconds[name] for name in names), strict=True))
        apart, together = ([row[at] / row[1] for row in rows] for at in (3, 2))
        sys.stdout.write(f"every {every}: separate {describe(apart)} validations, shared {describe(together)}\n")
        for ratio in RATIOS:
            scale = ratio / trained
            dearer = [(row[0] * scale + row[3]) / (row[0] * scale + row[2]) for row in rows]
            sys.stdout.write(f"  an epoch of {ratio} training images for one of validation: {describe(dearer)} times\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
