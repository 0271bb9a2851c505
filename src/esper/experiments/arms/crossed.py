"""The mean of scores that vary by training seed and by instance: how surely it is known, and whether it is zero.

Values are ``[N, M]``: N training seeds on the same M instances. Seeds and instances are both taken as drawn at random,
since whoever trains again gets another seed and meets other instances. In the two-way random-effects analysis of
variance, with mean squares A between seeds, B between instances and R of what is left, the variance of the mean is
``(A + B - R) / (N M)``. B and R are taken within families of instances, whose balance is part of the design, and
``B - R`` is not let below zero. Of one seed nothing is known of others: what is said then holds for that seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from esper.experiments.statistics import LEVEL, Floats, Interval


@dataclass(frozen=True)
class CrossedTest:
    """What is known of a mean."""

    interval: Interval
    p: float
    """Two-sided, that it is zero; 1 where the values are all zero."""


def crossed_interval(values: Floats, families: Sequence[str]) -> Interval:
    """Where the mean of ``values [N, M]`` lies, with the degrees of freedom of Satterthwaite (1946).

    Raises:
        ValueError: fewer than two instances, or not one family for each.
    """
    spread = _spread(values, families)
    return _interval(float(values.mean()), spread, spread.freedom)


def crossed_test(values: Floats, families: Sequence[str]) -> CrossedTest:
    """Whether the mean of ``values [N, M]`` is zero: the one-sample t-test of the seeds' means.

    Its standard error also takes in that other instances might have been drawn. The degrees of freedom are those of the
    seeds alone, N - 1: Satterthwaite's grant more where instances vary much, and raised up to 7% of false alarms where
    5% were allowed, with 3 or 4 seeds.

    Why not permute signs: of 5 seeds the smallest two-sided p is 2/32, so no difference could ever be shown, let alone
    after correction for several arms. Why not bootstrap: resampling 5 values knows no degrees of freedom. The price is
    that seeds' means have to be about normal, as means over many instances are.

    Raises:
        ValueError: as `crossed_interval`.
    """
    spread = _spread(values, families)
    mean, seeds = float(values.mean()), len(values)
    freedom = seeds - 1 if seeds > 1 else spread.freedom
    if spread.error == 0:
        return CrossedTest(Interval(mean, mean, mean), float(mean == 0))
    p = 2 * float(stats.t.sf(abs(mean) / spread.error, freedom))
    return CrossedTest(_interval(mean, spread, freedom), p)


@dataclass(frozen=True)
class _Spread:
    """Of a mean."""

    error: float
    """Its standard error."""
    freedom: float
    """Degrees of freedom (Satterthwaite)."""


def _interval(mean: float, spread: _Spread, freedom: float) -> Interval:
    half = spread.error * float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return Interval(mean, mean - half, mean + half)


def _spread(values: Floats, families: Sequence[str]) -> _Spread:
    seeds, instances = values.shape
    if instances < 2 or len(families) != instances:
        raise ValueError(f"{instances} instances with {len(families)} families: give at least two, and a family each")
    between, rest, freedom = _within_families(values, families)
    of_instances = max(between - rest, 0.0)
    of_seeds = instances * float(values.mean(1).var(ddof=1)) if seeds > 1 else 0.0
    whole = of_seeds + of_instances
    parts = of_seeds**2 / max(seeds - 1, 1) + of_instances**2 / freedom
    return _Spread((whole / values.size) ** 0.5, whole**2 / parts if parts else float(freedom))


def _within_families(values: Floats, families: Sequence[str]) -> tuple[float, float, int]:
    """Mean squares between instances and of the residuals (0 for one seed), and the former's degrees of freedom."""
    seeds, instances = values.shape
    names, member = np.unique(np.asarray(families), return_inverse=True)
    if len(names) == instances:
        names, member = names[:1], np.zeros_like(member)  # one of each: they are told apart as if of one family
    freedom = instances - len(names)
    shares = np.eye(len(names))[member]
    centred = values - values @ (shares / shares.sum(0)) @ shares.T  # less each seed's mean in the family
    by_instance = centred.mean(0)
    between = seeds * float(np.square(by_instance).sum()) / freedom
    residual = float(np.square(centred - by_instance).sum())
    return between, residual / ((seeds - 1) * freedom) if seeds > 1 else 0.0, freedom
