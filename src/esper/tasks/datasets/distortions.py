"""How transfer families change the inputs of a data set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.tasks.data import Floats

Distortion = Callable[[Floats, np.random.Generator, np.random.Generator], Floats]
"""``(inputs [N, D], fixed, fresh)`` to inputs: ``fixed`` is the same stream for every part of an instance, ``fresh``
another for each."""

MASKED = 0.4
"""Probability that a feature is blanked."""
GRAIN = 0.5
"""White noise, in deviations of the undistorted inputs."""


def masked(inputs: Floats, fixed: np.random.Generator, fresh: np.random.Generator) -> Floats:
    """Blank the same random features in every example."""
    del fresh
    blank = fixed.choice([True, False], size=inputs.shape[1], p=[MASKED, 1 - MASKED])
    return np.where(blank, np.float32(0), inputs)


def grainy(inputs: Floats, fixed: np.random.Generator, fresh: np.random.Generator) -> Floats:
    """Add white noise to every feature of every example."""
    del fixed
    grained = fresh.standard_normal(inputs.shape, dtype=np.float32)
    grained *= GRAIN * inputs.std()
    grained += inputs
    return grained
