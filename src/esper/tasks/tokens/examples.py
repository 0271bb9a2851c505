"""What the families of the token suite have in common: how examples are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from esper.tasks.data import Floats, Labels
from esper.tasks.tokens.host import CLASSES, FEATURES, TOKENS


class Examples(NamedTuple):
    """Raw inputs ``[N, TOKENS, FEATURES]`` and labels ``[N]``."""

    inputs: Floats
    labels: Labels


Sampler = Callable[[int, Floats, np.random.Generator], Examples]
"""``(N, directions, rng)`` to N examples. The rows of ``directions`` ``[FEATURES, FEATURES]`` are orthonormal and fixed
for the instance: they are what its host has to find."""

CLASS_NORM = 1.5
"""Length of the vectors that stand for token classes."""
CLASS_NOISE = 0.4
"""Deviation of the noise on token classes."""


def random_directions(rng: np.random.Generator) -> Floats:
    """A random orthonormal basis, one direction per row ``[FEATURES, FEATURES]``."""
    basis, _ = np.linalg.qr(rng.standard_normal((FEATURES, FEATURES)))
    return basis.astype(np.float32)


def gaussian_tokens(count: int, rng: np.random.Generator) -> Floats:
    """Standard normal tokens ``[N, TOKENS, FEATURES]``."""
    return rng.standard_normal((count, TOKENS, FEATURES), dtype=np.float32)


def class_tokens(classes: Labels, directions: Floats, rng: np.random.Generator) -> Floats:
    """Noisy vectors ``[N, TOKENS, FEATURES]`` for token classes ``[N, TOKENS]``, one direction each."""
    vectors = CLASS_NORM * directions[:CLASSES]
    tokens = gaussian_tokens(len(classes), rng)
    tokens *= CLASS_NOISE
    tokens += vectors[classes]
    return tokens


def random_labels(count: int, rng: np.random.Generator) -> Labels:
    """Uniform labels ``[N]``."""
    return rng.integers(CLASSES, size=count)
