"""What scores of several training seeds on the same instances say about which arm is better.

Scores of an arm are ``[N, M]``: N training seeds, each policy playing the same M instances. The claim is about the
arm, not about these seeds, so seeds are the units: whoever trains again gets another seed. Instances are shared by all,
which takes their difficulty out of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from esper.experiments.statistics import LEVEL, RESAMPLES, Floats, Interval, holm, interquartile_mean

SIGNIFICANCE = 1 - LEVEL
_SEED = 0
"""Of the resampling: equal scores give equal intervals."""


class Verdict(StrEnum):
    """What may be said of two arms."""

    FIRST = "first better"
    SECOND = "second better"
    OPEN = "no difference shown"
    TOO_FEW = "too few seeds to say"


@dataclass(frozen=True)
class Pair:
    """Two arms compared."""

    first: str
    second: str
    difference: Interval
    """Mean score of the first less that of the second; the interval is over seeds and instances."""
    middle_difference: float
    """The same of interquartile means over all seeds and instances."""
    p: float
    """Two-sided, by permuting the seeds' mean scores between the arms; adjusted for the number of pairs (Holm)."""
    mann_whitney_p: float
    """Two-sided, exact, of the same means; not adjusted."""
    probability_of_improvement: float
    """That a policy of the first arm beats one of the second on an instance; ties count half."""
    verdict: Verdict

    @property
    def words(self) -> str:
        """The verdict with the arms' names."""
        return self.verdict.replace("first", self.first).replace("second", self.second)


def judge(scores: Mapping[str, Floats], families: Sequence[str]) -> list[Pair]:
    """Compare the first arm with every other; ``families`` are those of the M instances.

    Each question asked costs power, so only those are declared that a reference answers.

    Raises:
        ValueError: the arms differ in seeds or instances, or there are none.
    """
    shapes = {values.shape for values in scores.values()}
    if len(shapes) != 1 or len(families) != next(iter(shapes))[1]:
        raise ValueError(f"scores {sorted(shapes)} with {len(families)} families: all arms play the same instances")
    reference, *others = scores
    couples = [(reference, other) for other in others]
    raw = [_permutation_p(scores[one].mean(1), scores[other].mean(1)) for one, other in couples]
    seeds = next(iter(shapes))[0]
    attainable = _smallest_p(seeds) * len(couples)
    return [
        _pair(one, other, scores[one], scores[other], families, p, attainable)
        for (one, other), p in zip(couples, holm(raw), strict=True)
    ]


def _pair(
    first: str, second: str, one: Floats, other: Floats, families: Sequence[str], p: float, attainable: float
) -> Pair:
    difference = _difference(one, other, families)
    wins = np.where(one[:, None] == other[None], 0.5, one[:, None] > other[None])
    return Pair(
        first,
        second,
        difference,
        float(interquartile_mean(one.ravel()) - interquartile_mean(other.ravel())),
        p,
        _mann_whitney_p(one.mean(1), other.mean(1)),
        float(wins.mean()),
        _verdict(difference, p, attainable, identical=np.array_equal(one, other)),
    )


def _verdict(difference: Interval, p: float, attainable: float, *, identical: bool) -> Verdict:
    """One arm is better only if both the test and the interval say so."""
    if identical:
        return Verdict.OPEN
    if attainable > SIGNIFICANCE:
        return Verdict.TOO_FEW
    if p > SIGNIFICANCE:
        return Verdict.OPEN
    if difference.above_zero:
        return Verdict.FIRST
    return Verdict.SECOND if difference.below_zero else Verdict.OPEN


def _smallest_p(seeds: int) -> float:
    """Of the two-sided exact permutation test of two groups of that many."""
    return 2 / math.comb(2 * seeds, seeds)


def _permutation_p(first: Floats, second: Floats) -> float:
    """Two-sided p-value of the difference of means, if it were arbitrary which seed belongs to which arm."""
    if len(first) == 1 or np.array_equal(first, second):
        return 1.0

    def difference(one: Floats, other: Floats, axis: int) -> Floats:
        return np.mean(one, axis) - np.mean(other, axis)

    tested = stats.permutation_test(
        (first, second), difference, permutation_type="independent", vectorized=True, rng=np.random.default_rng(_SEED)
    )
    return float(tested.pvalue)


def _mann_whitney_p(first: Floats, second: Floats) -> float:
    """Two-sided; exact where nothing is tied (Mann and Whitney 1947)."""
    return float(np.asarray(stats.mannwhitneyu(first, second))[1])


def _difference(one: Floats, other: Floats, families: Sequence[str]) -> Interval:
    """Percentile bootstrap of the mean difference: seeds of each arm, and instances within families, for both."""
    rng = np.random.default_rng(_SEED)
    columns = _instances(families, rng)
    rows = [_weights(rng, len(arm)) for arm in (one, other)]
    means = [np.einsum("rn,nm,rm->r", row, arm, columns) for row, arm in zip(rows, (one, other), strict=True)]
    estimate = float(one.mean() - other.mean())
    spread = means[0] - means[1]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(spread, (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))


def _weights(rng: np.random.Generator, count: int) -> Floats:
    """Weights ``[RESAMPLES, count]`` of a resampling of that many, spread so that the variance is unbiased."""
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    return 1 / count + (drawn - 1 / count) * math.sqrt(count / max(count - 1, 1))


def _instances(families: Sequence[str], rng: np.random.Generator) -> Floats:
    """Weights ``[RESAMPLES, M]`` of the instances, resampled within their families."""
    names = np.asarray(families)
    weights: NDArray[np.float64] = np.zeros((RESAMPLES, len(names)))
    for name in np.unique(names):
        members = np.flatnonzero(names == name)
        weights[:, members] = _weights(rng, len(members)) * (len(members) / len(names))
    return weights
