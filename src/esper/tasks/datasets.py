"""Fixed data sets as arrays, scikit-learn's digits and MNIST-1D, and how transfer families distort them.

MNIST-1D is ten hand-drawn curves, deformed at random into signals of 40 points. The recipe and its constants are those
of S. Greydanus and D. Kobak, "Scaling Down Deep Learning with MNIST-1D" (arXiv:2011.14439). The generator of random
numbers is another, so the examples are new draws from the published distribution. Published test accuracies: logistic
regression 32%, MLP 68%, CNN 94%.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import cast

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits

from esper.numerics.arrays import Bools, Float32s, Floats, Ints
from esper.tasks.data import LabelledArrays
from esper.tasks.suite import Source

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
