"""Suites on data sets, with the data sets themselves: digits and MNIST-1D."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import cast

import numpy as np
import torch
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import nn

from esper.errors import TaskError
from esper.numerics.arrays import Bools, Float32s, Floats, Ints
from esper.numerics.random_streams import child_generator
from esper.numerics.stacking import Stackable
from esper.tasks.instance import PARTS, Data, Instance, LabelledArrays, Part, Scale, add_label_noise, standardise
from esper.tasks.layers import Conv1d, Linear
from esper.tasks.registry import lookup
from esper.tasks.suite import OptimizerSettings, Source, Suite, draw_log_uniform

CLASSES = 10
"""Classes of either data set."""


def _read_only(inputs: Floats, labels: Ints) -> LabelledArrays:
    """A data set that every instance in the process shares."""
    shared = LabelledArrays(inputs.astype(np.float32), labels.astype(np.int64))
    for array in shared:
        array.flags.writeable = False
    return shared


DIGITS_SOURCE = Source("shipped with scikit-learn", Path(str(files("sklearn.datasets.data") / "digits.csv.gz")))


@cache
def digits() -> LabelledArrays:
    """1797 examples of 64 pixels in their published order (later rows come from other writers), ten classes."""
    return _read_only(*cast("tuple[Floats, Ints]", load_digits(return_X_y=True)))


EXAMPLES_PER_CLASS = 500
LENGTH = 40

TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
"""The curves of the digits 0 to 9; each starts and ends at the same height."""

TEMPLATE_LENGTH = len(TEMPLATES[0])
TEMPLATE_SCALE = 1 / 6
PADDING = (36, 60)
"""Fewest and most points of silence appended to a curve; the sum is then stretched to the length of the longest."""
CANVAS = TEMPLATE_LENGTH + PADDING[1]
SCALE_SPREAD = 0.4
MAX_TRANSLATION = 48
CORRELATED_NOISE, CORRELATION_LENGTH = 0.25, 2
WHITE_NOISE = 0.02
SHEAR_SPREAD = 0.75
SEED = 42


@cache
def mnist1d() -> LabelledArrays:
    """5000 shuffled signals of 40 points, 500 of each class; standardised over all, as published."""
    rng = np.random.default_rng(SEED)
    labels = rng.permutation(np.repeat(np.arange(CLASSES), EXAMPLES_PER_CLASS))
    signals = _signals(labels, rng)
    return _read_only((signals - signals.mean()) / signals.std(), labels)


def normalise_templates() -> Floats:
    """The curves ``[CLASSES, TEMPLATE_LENGTH]`` with equal deviation, starting and ending at 0."""
    curves = np.array(TEMPLATES)
    curves = (curves - curves.mean(axis=1, keepdims=True)) / curves.std(axis=1, keepdims=True)
    return (curves - curves[:, :1]) * TEMPLATE_SCALE


def _signals(labels: Ints, rng: np.random.Generator) -> Floats:
    """One deformed curve ``[N, LENGTH]`` for each label ``[N]``."""
    column = (len(labels), 1)
    curve, drawn = _stretch(labels, rng.integers(PADDING[0], PADDING[1] + 1, size=column))
    curve *= 1 + SCALE_SPREAD * (rng.random(column) - 0.5)

    shifted = (np.arange(CANVAS) - rng.integers(MAX_TRANSLATION, size=column)) % CANVAS
    curve = np.take_along_axis(curve, shifted, axis=1)
    drawn = np.take_along_axis(drawn, shifted, axis=1)

    wander, white = rng.standard_normal((2, *curve.shape))
    ndimage.gaussian_filter1d(CORRELATED_NOISE * wander, CORRELATION_LENGTH, axis=1, output=wander)
    signal = np.where(drawn, curve, wander) + WHITE_NOISE * white

    slope = SHEAR_SPREAD * (rng.random(column) - 0.5)
    return _resample(signal - slope * np.linspace(-0.5, 0.5, CANVAS))


def _stretch(labels: Ints, padding: Ints) -> tuple[Floats, Bools]:
    """Curves padded with ``padding [N, 1]`` zeros and interpolated to ``[N, CANVAS]``; where a curve is drawn, too."""
    padded = np.pad(normalise_templates(), ((0, 0), (0, PADDING[1])))
    position = np.linspace(0, 1, CANVAS) * (TEMPLATE_LENGTH + padding - 1)
    left = np.minimum(position.astype(np.int64), CANVAS - 2)
    fraction = position - left
    rows = labels[:, None]
    curve = (1 - fraction) * padded[rows, left] + fraction * padded[rows, left + 1]
    return curve, position < TEMPLATE_LENGTH


def _resample(signals: Floats) -> Floats:
    """Signals ``[N, CANVAS]`` interpolated to ``[N, LENGTH]``."""
    position = np.linspace(0, CANVAS - 1, LENGTH)
    left = np.minimum(position.astype(np.int64), CANVAS - 2)
    fraction = position - left
    return (1 - fraction) * signals[:, left] + fraction * signals[:, left + 1]


Distortion = Callable[[Float32s, np.random.Generator, np.random.Generator], Float32s]
"""``(inputs [N, D], fixed, fresh)`` to inputs: ``fixed`` is the same stream for every part of an instance, ``fresh``
another for each."""

MASKED = 0.4
"""Probability that a feature is blanked."""
GRAIN = 0.5
"""White noise, in deviations of the undistorted inputs."""


def mask_features(inputs: Float32s, fixed: np.random.Generator, fresh: np.random.Generator) -> Float32s:
    """Blank the same random features in every example."""
    del fresh
    blank = fixed.choice([True, False], size=inputs.shape[1], p=[MASKED, 1 - MASKED])
    return np.where(blank, np.float32(0), inputs)


def add_grain(inputs: Float32s, fixed: np.random.Generator, fresh: np.random.Generator) -> Float32s:
    """Add white noise to every feature of every example."""
    del fixed
    grained = fresh.standard_normal(inputs.shape, dtype=np.float32)
    grained *= GRAIN * inputs.std()
    grained += inputs
    return grained


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
    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
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
            learning_rate=draw_log_uniform(*LEARNING_RATES, rng),
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

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
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

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> ConvHost:
        return ConvHost(widths, self.classes, generator)
