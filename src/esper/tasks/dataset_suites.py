"""Suites on fixed data sets: digits and MNIST-1D, each with hosts too narrow for it.

Instances differ in host, amount and quality of the data, and rent. Narrower hosts are wider ones with zeros, as `Suite`
promises.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from esper.errors import TaskError
from esper.numerics.arrays import Float32s, Ints
from esper.numerics.random_streams import child_generator
from esper.numerics.stacking import Stackable
from esper.tasks.data import PARTS, Data, LabelledArrays, Part, Scale, add_label_noise, standardise
from esper.tasks.datasets import (
    CLASSES,
    DIGITS_SOURCE,
    LENGTH,
    Distortion,
    add_grain,
    digits,
    mask_features,
    mnist1d,
)
from esper.tasks.instance import Instance
from esper.tasks.layers import Conv1d, Linear
from esper.tasks.registry import lookup
from esper.tasks.suite import OptimizerSettings, Suite, log_uniform


class MlpHost(Stackable):
    """Features ``[..., B, D]`` through two ReLU layers to logits ``[..., B, classes]``;
    ``layer0`` and ``layer1`` are sites.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second = widths
        self.layer0 = nn.Sequential(Linear(features, first, generator), nn.ReLU())
        self.layer1 = nn.Sequential(Linear(first, second, generator), nn.ReLU())
        self.head = Linear(second, classes, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer1(self.layer0(inputs)))


class ConvHost(Stackable):
    """Signals ``[..., B, 1, L]`` through three ReLU convolutions, mean over L and a linear head to logits.

    ``layer0`` to ``layer2`` are sites; the first two convolutions halve L.
    """

    def __init__(self, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second, third = widths
        self.layer0 = nn.Sequential(Conv1d(1, first, 5, 2, generator), nn.ReLU())
        self.layer1 = nn.Sequential(Conv1d(first, second, 3, 2, generator), nn.ReLU())
        self.layer2 = nn.Sequential(Conv1d(second, third, 3, 1, generator), nn.ReLU())
        self.head = Linear(third, classes, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(features.mean(dim=-1))


LEARNING_RATES = (0.007, 0.02)
RENTS = (0.03, 0.08, 0.15)
NOISE = 0.3

_SPLIT, _LABELS, _FIXED, _FRESH = range(4)
"""Keys of an instance's random streams."""


@dataclass(frozen=True)
class Condition:
    """What a family does to the data."""

    scarce: bool = False
    label_noise: float = 0.0
    distortion: Distortion | None = None


_TRAINING: Mapping[str, Condition] = {
    "clean": Condition(),
    "scarce": Condition(scarce=True),
    "noisy": Condition(label_noise=NOISE),
}
_TRANSFER: Mapping[str, Condition] = {
    "masked": Condition(distortion=mask_features),
    "grainy": Condition(distortion=add_grain),
}
_CONDITIONS = {**_TRAINING, **_TRANSFER}


class DatasetSuite(Suite):
    """The last ``test_size`` rows of a data set are for test; each instance splits the others by its own seed.

    A family is a condition of the data, a variant the widths of the host.
    """

    classes = CLASSES
    steps = 30
    batches_per_step = 16
    batch_size = 64
    validation_size = 256
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0)
    families = tuple(_TRAINING)
    transfer_families = tuple(_TRANSFER)

    train_sizes: tuple[int, ...]
    scarce_train_size: int
    dataset: Callable[[], LabelledArrays]
    """The data set, built once in a process."""
    host_widths: tuple[tuple[int, ...], ...]
    """Widths of the variants, the widest host first."""

    @abstractmethod
    def build(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        """A host of these widths with first weights from ``generator``."""

    def template(self) -> nn.Module:
        return self.build(self.host_widths[0], torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> nn.Module:
        self.check(instance)
        return self.build(instance.widths, torch.Generator().manual_seed(instance.seed))

    def variants(self, family: str) -> tuple[str, ...]:
        """Every family has one variant for each shape of host; raises TaskError for an unknown family."""
        _condition(family)
        return tuple(self._widths())

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        condition = _condition(family)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=lookup(f"variant of suite '{self.name}'", variant, self._widths()),
            learning_rate=log_uniform(*LEARNING_RATES, rng),
            train_size=self.scarce_train_size if condition.scarce else int(rng.choice(self.train_sizes)),
            rent=float(rng.choice(RENTS)),
            label_noise=condition.label_noise,
        )

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, *input_shape]``, standardised by the training part, and labels; nothing drifts here."""
        self.check(instance)
        if phase:
            raise TaskError(f"suite '{self.name}' has no phase {phase}: its data never drift")
        inputs = self._inputs(instance, part)
        labels = self.dataset().labels[self._rows(instance, part)]
        if part == "train" and instance.label_noise:
            labels = add_label_noise(
                labels, instance.label_noise, self.classes, child_generator(instance.seed, _LABELS)
            )
        scale = Scale.of(inputs if part == "train" else self._inputs(instance, "train"))
        return standardise(inputs.reshape(-1, *self.input_shape), labels, scale)

    def _widths(self) -> dict[str, tuple[int, ...]]:
        return {"_".join(map(str, widths)): widths for widths in self.host_widths}

    def _inputs(self, instance: Instance, part: Part) -> Float32s:
        inputs = self.dataset().inputs[self._rows(instance, part)]
        distortion = _condition(instance.family).distortion
        if distortion is None:
            return inputs
        fixed, fresh = child_generator(instance.seed, _FIXED), child_generator(instance.seed, _FRESH, PARTS.index(part))
        return distortion(inputs, fixed, fresh)

    def _rows(self, instance: Instance, part: Part) -> Ints:
        """The rows ``[N]`` of the data set that make up a part of the instance."""
        total = len(self.dataset().labels)
        pool = total - self.test_size
        if part == "test":
            return np.arange(pool, total)
        if instance.train_size + self.validation_size > pool:
            room = pool - self.validation_size
            raise TaskError(f"instance {instance.name} asks for {instance.train_size} training examples; {room} exist")
        rows = child_generator(instance.seed, _SPLIT).permutation(pool)
        if part == "validation":
            return rows[: self.validation_size]
        return rows[self.validation_size : self.validation_size + instance.train_size]


def _condition(family: str) -> Condition:
    return lookup("family of fixed data", family, _CONDITIONS)


class MlpSuite(DatasetSuite):
    """Flat features and MLP hosts."""

    sites = ("layer0", "layer1")
    blueprints = ("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip")
    host_widths = ((12, 12), (12, 3), (3, 12), (4, 4))

    def build(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return MlpHost(self.input_shape[0], widths, self.classes, generator)


class DigitsSuite(MlpSuite):
    """8 x 8 handwritten digits as 64 features."""

    name = "digits"
    source = DIGITS_SOURCE
    dataset = staticmethod(digits)
    input_shape = (64,)
    test_size = 360
    train_sizes = (384, 768, 1152)
    scarce_train_size = 128


class Mnist1dSuite(MlpSuite):
    """MNIST-1D as 40 features."""

    name = "mnist1d"
    dataset = staticmethod(mnist1d)
    input_shape = (LENGTH,)
    test_size = 1000
    train_sizes = (1024, 2048, 3584)
    scarce_train_size = 384


class Mnist1dConvSuite(DatasetSuite):
    """MNIST-1D as signals of one channel."""

    name = "mnist1d_conv"
    dataset = staticmethod(mnist1d)
    input_shape = (1, LENGTH)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("norm", "conv1x1", "depthwise", "conv3x3", "gate")
    test_size = Mnist1dSuite.test_size
    train_sizes = Mnist1dSuite.train_sizes
    scarce_train_size = Mnist1dSuite.scarce_train_size
    host_widths = ((8, 8, 8), (8, 3, 8), (3, 8, 8), (4, 4, 4))

    def build(self, widths: tuple[int, ...], generator: torch.Generator) -> ConvHost:
        return ConvHost(widths, self.classes, generator)
