"""Plain figures of scores: intervals, the interquartile mean, how often one beats another, Holm's correction.

Which of two is better is for `esper.experiments.analysis` to say; the interquartile mean and the probability of
improvement (Agarwal et al., 2021) only describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
TRIM = 0.25


@dataclass(frozen=True)
class Interval:
    """An estimate and where the true value lies."""

    estimate: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """The whole interval is positive."""
        return self.low > 0

    @property
    def below_zero(self) -> bool:
        """The whole interval is negative."""
        return self.high < 0


def interquartile_mean(values: Floats) -> float:
    """Mean of the middle half of all values: as robust as a median, less noisy (Agarwal et al., 2021)."""
    return float(stats.trim_mean(values.ravel(), TRIM))


def probability_of_improvement(first: Floats, second: Floats, *, paired: bool) -> float:
    """How often ``first [N, M]`` is above ``second``, ``[N, M]`` or ``[1, M]``, on an instance; ties count half.

    Not paired, every seed of the one meets every seed of the other.
    """
    one, other = (first, second) if paired else (first[:, None], second[None])
    return float(np.where(one == other, 0.5, one > other).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, so that the chance of any false alarm is bounded (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    stepped = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()
