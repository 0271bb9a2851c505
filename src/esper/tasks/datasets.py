"""The data sets digits and MNIST-1D, and the suites on them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import nn

from esper.errors import TaskError
from esper.numerics.arrays import Float32s, Floats, Ints
from esper.numerics.modules import Conv1d, Linear, Stackable
from esper.numerics.random_streams import child_generator
from esper.tasks.instance import PARTS, Instance, LabelledArrays, Part, add_label_noise
from esper.tasks.suite import OptimizerSettings, SampledSuite, Source, draw_log_uniform, find_by_name

CLASSES = 10
"""Number of classes in each data set."""


def make_read_only(inputs: NDArray[Any], labels: Ints) -> LabelledArrays:
    """A data set as read-only arrays, which all instances in the process share."""
    shared = LabelledArrays(inputs, labels)
    for array in shared:
        array.flags.writeable = False
    return shared


# Digits

DIGITS_SOURCE = Source("shipped with scikit-learn", Path(str(files("sklearn.datasets.data") / "digits.csv.gz")))


@cache
def digits() -> LabelledArrays:
    """The 1797 examples, of 64 pixels and ten classes, in the published order: later rows are by other writers."""
    inputs, labels = cast("tuple[Floats, Ints]", load_digits(return_X_y=True))
    return make_read_only(inputs.astype(np.float32), labels.astype(np.int64))


# MNIST-1D (Greydanus and Kobak, 2024, arXiv:2011.14439), computed from its published recipe

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
"""The curves of the digits 0 to 9. Each starts and ends at the same height."""

TEMPLATE_LENGTH = len(TEMPLATES[0])
TEMPLATE_SCALE = 1 / 6
PADDING = (36, 60)
"""Smallest and largest number of zeros appended to a curve; the padded curve is then stretched to a common length."""
CANVAS = TEMPLATE_LENGTH + PADDING[1]
SCALE_SPREAD = 0.4
MAX_TRANSLATION = 48
CORRELATED_NOISE, CORRELATION_LENGTH = 0.25, 2
WHITE_NOISE = 0.02
SHEAR_SPREAD = 0.75
SEED = 42


@cache
def mnist1d() -> LabelledArrays:
    """5000 shuffled signals of 40 points, 500 of each class, standardised over the whole data set as published."""
    rng = np.random.default_rng(SEED)
    labels = rng.permutation(np.repeat(np.arange(CLASSES), EXAMPLES_PER_CLASS))
    signals = _synthesise_signals(labels, rng)
    return make_read_only(((signals - signals.mean()) / signals.std()).astype(np.float32), labels)


def normalise_templates() -> Floats:
    """The curves ``[CLASSES, TEMPLATE_LENGTH]``, scaled to the same standard deviation and starting and ending at 0."""
    curves = np.array(TEMPLATES)
    curves = (curves - curves.mean(axis=1, keepdims=True)) / curves.std(axis=1, keepdims=True)
    return (curves - curves[:, :1]) * TEMPLATE_SCALE


def _synthesise_signals(labels: Ints, rng: np.random.Generator) -> Floats:
    """One deformed curve ``[N, LENGTH]`` for each label ``[N]``."""
    column = (len(labels), 1)

    # Pad each curve with a random number of zeros, and stretch the result to the length of the canvas.
    padding = rng.integers(PADDING[0], PADDING[1] + 1, size=column)
    padded = np.pad(normalise_templates(), ((0, 0), (0, PADDING[1])))
    position = np.linspace(0, 1, CANVAS) * (TEMPLATE_LENGTH + padding - 1)
    left = np.minimum(position.astype(np.int64), CANVAS - 2)
    fraction = position - left
    rows = labels[:, None]
    curve = (1 - fraction) * padded[rows, left] + fraction * padded[rows, left + 1]
    is_curve = position < TEMPLATE_LENGTH

    # Scale and translate it.
    curve *= 1 + SCALE_SPREAD * (rng.random(column) - 0.5)
    shifted = (np.arange(CANVAS) - rng.integers(MAX_TRANSLATION, size=column)) % CANVAS
    curve = np.take_along_axis(curve, shifted, axis=1)
    is_curve = np.take_along_axis(is_curve, shifted, axis=1)

    # Correlated noise replaces the padding; white noise is added everywhere.
    correlated, white = rng.standard_normal((2, *curve.shape))
    ndimage.gaussian_filter1d(CORRELATED_NOISE * correlated, CORRELATION_LENGTH, axis=1, output=correlated)
    signal = np.where(is_curve, curve, correlated) + WHITE_NOISE * white

    # Shear it, and resample it to its final length.
    slope = SHEAR_SPREAD * (rng.random(column) - 0.5)
    signal = signal - slope * np.linspace(-0.5, 0.5, CANVAS)
    position = np.linspace(0, CANVAS - 1, LENGTH)
    left = np.minimum(position.astype(np.int64), CANVAS - 2)
    fraction = position - left
    return (1 - fraction) * signal[:, left] + fraction * signal[:, left + 1]


# Distortions of the transfer families

Distortion = Callable[[Float32s, np.random.Generator, np.random.Generator], Float32s]
"""Maps ``(inputs [N, D], fixed, fresh)`` to distorted inputs ``[N, D]``. The generator ``fixed`` has the same seed for
every part of an instance."""

MASKED = 0.4
"""Probability that a feature is set to zero."""
WHITE_NOISE_ON_INPUTS = 0.5
"""Standard deviation of the white noise, relative to that of the inputs."""


def mask_features(inputs: Float32s, fixed: np.random.Generator, _fresh: np.random.Generator) -> Float32s:
    """Set the same random features to zero in every example."""
    blank = fixed.choice([True, False], size=inputs.shape[1], p=[MASKED, 1 - MASKED])
    return np.where(blank, np.float32(0), inputs)


def add_white_noise(inputs: Float32s, _fixed: np.random.Generator, fresh: np.random.Generator) -> Float32s:
    """Add white noise to every feature of every example."""
    noisy = fresh.standard_normal(inputs.shape, dtype=np.float32)
    noisy *= WHITE_NOISE_ON_INPUTS * inputs.std()
    noisy += inputs
    return noisy


# Hosts


class MlpHost(Stackable):
    """Two ReLU layers, both sites, and a linear head: features ``[..., B, D]`` to logits ``[..., B, classes]``."""

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        first, second = widths
        self.layer0 = nn.Sequential(Linear(features, first, generator), nn.ReLU())
        self.layer1 = nn.Sequential(Linear(first, second, generator), nn.ReLU())
        self.head = Linear(second, classes, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer1(self.layer0(inputs)))


class ConvHost(Stackable):
    """Three ReLU convolutions, a mean over L and a linear head: signals ``[..., B, 1, L]`` to ``[..., B, classes]``.

    The convolutions ``layer0`` to ``layer2`` are sites; the first two halve L.
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


# Suites

RENTS = (0.03, 0.08, 0.15)
NOISE = 0.3

_SPLIT, _LABELS, _FIXED, _FRESH = range(4)
"""Keys of an instance's random streams."""


@dataclass(frozen=True)
class Condition:
    """How a family changes the data."""

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
    "grainy": Condition(distortion=add_white_noise),
}
_CONDITIONS = {**_TRAINING, **_TRANSFER}


class DatasetSuite(SampledSuite):
    """A suite on a fixed data set: a family is a condition of the data, a variant the widths of the host.

    The last ``test_size`` rows are the test part; each instance splits the others by its random seed.
    """

    classes = CLASSES
    steps = 30
    batches_per_step = 16
    batch_size = 64
    validation_size = 256
    optimizer = OptimizerSettings()
    families = tuple(_TRAINING)
    transfer_families = tuple(_TRANSFER)

    learning_rates = (0.007, 0.02)
    train_sizes: tuple[int, ...]
    scarce_train_size: int
    dataset: Callable[[], LabelledArrays]
    """Returns the data set, with inputs ``[N, D]`` of any dtype; it is built once per process."""
    host_widths: tuple[tuple[int, ...], ...]
    """Widths of the variants, the widest host first."""

    @abstractmethod
    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        """A host of these widths, initialised from ``generator``."""

    def list_widths(self) -> dict[str, tuple[int, ...]]:
        """Widths of the host by variant."""
        return {"_".join(map(str, widths)): widths for widths in self.host_widths}

    def template(self) -> nn.Module:
        return self.build_host(self.host_widths[0], torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> nn.Module:
        self.check(instance)
        return self.build_host(instance.widths, torch.Generator().manual_seed(instance.seed))

    def variants(self, family: str) -> tuple[str, ...]:
        """One variant per host, for every family; raises TaskError for an unknown family."""
        _find_condition(family)
        return tuple(self.list_widths())

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        condition = _find_condition(family)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=find_by_name(f"variant of suite '{self.name}'", variant, self.list_widths()),
            learning_rate=draw_log_uniform(*self.learning_rates, rng),
            train_size=self.scarce_train_size if condition.scarce else int(rng.choice(self.train_sizes)),
            rent=float(rng.choice(RENTS)),
            label_noise=condition.label_noise,
        )

    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        rows = self._select_rows(instance, part)
        dataset = self.dataset()
        inputs, labels = dataset.inputs[rows].astype(np.float32, copy=False), dataset.labels[rows]
        distortion = _find_condition(instance.family).distortion
        if distortion is not None:
            fresh = child_generator(instance.seed, _FRESH, PARTS.index(part))
            inputs = distortion(inputs, child_generator(instance.seed, _FIXED), fresh)
        if part == "train" and instance.label_noise:
            noise = child_generator(instance.seed, _LABELS)
            labels = add_label_noise(labels, instance.label_noise, self.classes, noise)
        return LabelledArrays(inputs.reshape(-1, *self.input_shape), labels)

    def _select_rows(self, instance: Instance, part: Part) -> Ints:
        """Indices ``[N]`` of the data set's rows in a part of the instance."""
        total = len(self.dataset().labels)
        pool = total - self.test_size
        if part == "test":
            return np.arange(pool, total)
        if instance.train_size + self.validation_size > pool:
            available = pool - self.validation_size
            raise TaskError(
                f"instance {instance.name} needs {instance.train_size} training examples, but only {available} exist"
            )
        # Validation rows come first, then as many training rows as the instance has.
        rows = child_generator(instance.seed, _SPLIT).permutation(pool)
        if part == "validation":
            return rows[: self.validation_size]
        return rows[self.validation_size : self.validation_size + instance.train_size]


def _find_condition(family: str) -> Condition:
    return find_by_name("family of fixed data", family, _CONDITIONS)


class MlpSuite(DatasetSuite):
    """A suite on a data set of plain features, with `MlpHost` as the host."""

    sites = ("layer0", "layer1")
    blueprints = ("norm", "lowrank", "mlp", "mlp_wide", "gate", "input_skip")
    host_widths = ((12, 12), (12, 3), (3, 12), (4, 4))

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return MlpHost(self.input_shape[0], widths, self.classes, generator)


class DigitsSuite(MlpSuite):
    """Handwritten digits of 8 x 8 pixels, as 64 features."""

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
    """MNIST-1D as signals with one channel."""

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
