"""How alpha moves from one value to another."""

from __future__ import annotations

import math

import numpy as np

from esper.arrays import Float32s, Int8s, Int16s
from esper.lifecycle.actions import ALPHA_SPEEDS, TEMPOS, Curve

SIGMOID_STEEPNESS = 10.0
"""Slope of the logistic curve: at 10 its ends would miss 0 and 1 by .7%, which the rescaling removes."""
LONGEST = max(*TEMPOS, *ALPHA_SPEEDS)


def progress(curve: Curve, fraction: float) -> float:
    """The part of the way that is behind at a ``fraction`` in [0, 1] of the time; it rises from exactly 0 to exactly 1.

    linear x; cosine (1 - cos(pi x)) / 2; sigmoid (f(x) - f(0)) / (f(1) - f(0)), f(x) = 1 / (1 + exp(-k (x - 1/2))).
    """
    if fraction <= 0.0 or fraction >= 1.0:
        return float(fraction >= 1.0)
    if curve is Curve.LINEAR:
        return fraction
    if curve is Curve.COSINE:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0
    first, last = _logistic(0.0), _logistic(1.0)
    return (_logistic(fraction) - first) / (last - first)


def _logistic(fraction: float) -> float:
    return 1.0 / (1.0 + math.exp(-SIGMOID_STEEPNESS * (fraction - 0.5)))


# [curve, duration, elapsed]. A lookup is not only fast: vectorised cos and exp may round by an element's place in the
# array, and then one environment's alpha would depend on how many others there are.
_PROGRESS: Float32s = np.array(
    [
        [
            [progress(curve, elapsed / max(duration, 1)) for elapsed in range(LONGEST + 1)]
            for duration in range(LONGEST + 1)
        ]
        for curve in Curve
    ],
    dtype=np.float32,
)


def alpha_at(start: Float32s, target: Float32s, elapsed: Int16s, duration: Int16s, curve: Int8s) -> Float32s:
    """Alpha ``elapsed`` of ``duration`` steps after it left ``start`` for ``target``, which it reaches exactly.

    All arrays have one shape; durations are 1 to `LONGEST` steps and elapsed is at most the duration.
    """
    moving = start + (target - start) * _PROGRESS[curve, duration, elapsed]
    return np.where(elapsed >= duration, target, moving)
