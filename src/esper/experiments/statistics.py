"""What a set of scores says, and how surely: intervals, paired comparisons, correction for asking many questions.

Scores are given as arrays ``[N]``, one value per instance. Intervals are bootstrapped within strata (families of
instances), since a balanced draw of families is part of the design and not chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Reduces the last axis: ``[..., N]`` to ``[...]``."""

LEVEL = 0.95
RESAMPLES = 4000
PERMUTATIONS = 9999
TRIM = 0.25


@dataclass(frozen=True)
class Interval:
    """An estimate and where the true value lies with probability `LEVEL`."""

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


def mean(values: Floats) -> Floats:
    """Arithmetic mean over the last axis."""
    return values.mean(-1)


def interquartile_mean(values: Floats) -> Floats:
    """Mean of the middle half over the last axis: as robust as a median, less noisy (Agarwal et al., 2021)."""
    return np.asarray(stats.trim_mean(values, TRIM, axis=-1), np.float64)


def bootstrap_interval(
    values: Floats, strata: Sequence[str], rng: np.random.Generator, statistic: Statistic = mean
) -> Interval:
    """Percentile bootstrap of a statistic of ``values [N]``, resampled within the ``strata`` (one name per value).

    Resampling n values understates the variance of their mean by the factor (n - 1) / n, which shows in small strata;
    so values are first spread about their stratum's mean to make up for it. A stratum of one value tells nothing of
    its own spread and is pooled with another.

    Raises:
        ValueError: fewer than two values, or not one stratum per value.
    """
    if len(values) < 2 or len(strata) != len(values):
        raise ValueError(f"{len(values)} values with {len(strata)} strata: give at least two, and a stratum for each")
    resampled = statistic(np.concatenate([_resampled(values[pool], rng) for pool in _pools(strata)], axis=-1))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(float(statistic(values)), float(low), float(high))


def paired_difference(first: Floats, second: Floats, strata: Sequence[str], rng: np.random.Generator) -> Interval:
    """Mean of ``first - second`` over the instances that both played, ``[N]`` each."""
    return bootstrap_interval(first - second, strata, rng)


def probability_of_improvement(
    first: Floats, second: Floats, strata: Sequence[str], rng: np.random.Generator
) -> Interval:
    """Share of the paired instances on which ``first`` is above ``second``; ties count half.

    Where one side wins every time, resampling knows no doubt; the interval is then the exact one of Clopper and
    Pearson (1934).
    """
    wins = np.where(first == second, 0.5, (first > second).astype(float))
    found = bootstrap_interval(wins, strata, rng)
    surely_above = ((1 - LEVEL) / 2) ** (1 / len(wins))
    if found.estimate == 1:
        return Interval(1.0, surely_above, 1.0)
    if found.estimate == 0:
        return Interval(0.0, 0.0, 1 - surely_above)
    return Interval(found.estimate, max(found.low, 0.0), min(found.high, 1.0))


def paired_permutation_p(first: Floats, second: Floats, rng: np.random.Generator) -> float:
    """Two-sided p-value of the mean difference, if which of a pair is which were arbitrary."""

    def mean_difference(one: Floats, other: Floats, axis: int) -> Floats:
        return np.mean(one - other, axis=axis)

    tested = stats.permutation_test(
        (first, second),
        mean_difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=1000,
        rng=rng,
    )
    return float(tested.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, so that the chance of any false alarm is bounded (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    stepped = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def _resampled(values: Floats, rng: np.random.Generator) -> Floats:
    """``[RESAMPLES, n]`` draws with replacement from ``values [n]``, spread for an unbiased variance."""
    centre, count = values.mean(), len(values)
    spread = centre + (values - centre) * np.sqrt(count / (count - 1))
    return spread[rng.integers(count, size=(RESAMPLES, count))]


def _pools(strata: Sequence[str]) -> list[NDArray[np.intp]]:
    """The indices of each stratum's values; those of single values together, with another stratum's if need be."""
    names = np.asarray(strata)
    pools = [np.flatnonzero(names == name) for name in np.unique(names)]
    single = [pool for pool in pools if len(pool) == 1]
    larger = sorted((pool for pool in pools if len(pool) > 1), key=len, reverse=True)
    if len(single) == 1:
        single.append(larger.pop())
    return [*larger, np.concatenate(single)] if single else larger
