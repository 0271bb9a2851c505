"""Is A better than B? The statistical analysis of all comparisons, in the terminal, in reports and as JSON.

Scores are ``[N, M]``: N training seeds, whose policies run on M instances. Both are treated as random samples (Clark
1973, "The language-as-fixed-effect fallacy"), because another training has another seed and other instances. Families
of instances are fixed strata, whose balance is part of the design. In the two-way random-effects analysis of variance,
the mean of one table has the variance

    V = S / N + max(B - R / N, 0) / M

where S is the variance of the seeds' means, B the variance of the instances' means, and R the residual variance, the
latter two within families. S / N covers the chance effects of seeds and of single episodes; the second term covers
effects of instances that are common to all seeds. The degrees of freedom are those of Satterthwaite (1946), and the
statistic is Student's t.

How two tables are paired depends on what they share. Results of the same policies on the same instances (a policy and
its own actions shuffled), or of an arm that does not depend on training seeds, are subtracted and give one table. Ways
of training share only instances: the same seed gives the same start, but learning amplifies the first difference until
the two trainings are unrelated. So their seeds are independent, each way contributes its own S / N (Welch 1947), and B
and R are those of the difference.

With fewer than `FEWEST_SEEDS` seeds, nothing is claimed about which way of training is better: there is no interval of
the difference, no p-value and no verdict. With one seed, a claim is still possible about that policy on other
instances.

A permutation test is not used because with 5 seeds against 5 its smallest two-sided p-value is 2/252, and with 5 signs
2/32; after Holm's correction for eleven arms, nothing could be shown. A bootstrap is not used because resampling five
values ignores the degrees of freedom. The price is that seeds' means must be approximately normal;
docs/experiments.md reports how far they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats

from esper.errors import RunError, plural
from esper.numerics.arrays import Floats

LEVEL = 0.95
SIGNIFICANCE = 1 - LEVEL
FEWEST_SEEDS = 5
"""Smallest number of seeds for any claim about a way of training."""
TRIM = 0.25

Families = Sequence[str] | None
"""Families of the M instances; None if every seed has its own instances, which then count as a part of the seed."""


class Claim(StrEnum):
    """What a comparison is about."""

    POLICY = "this policy"
    """One training seed: the claim is about the same policy on other instances."""
    CONTROLLER = "this controller"
    """A given controller: the claim is about the same controller on other instances."""
    TRAINING = "this way of training"
    """Several training seeds: the claim is about other training seeds and other instances."""


class Verdict(StrEnum):
    """What a comparison shows about the first of two contenders."""

    ABOVE = "above"
    BELOW = "below"
    OPEN = "no difference shown"
    TOO_FEW = "too few seeds to say"


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """Scores of two contenders on the same instances."""

    first: Floats
    """``[N, M]``."""
    second: Floats
    """``[N, M]``, or ``[1, M]`` if the scores do not depend on training seeds."""
    paired: bool
    """Whether row n of both tables is from the same training; a second table of one row is paired with every row."""

    @property
    def tables(self) -> list[Floats]:
        """Tables whose means add up to the difference, and whose seeds are independent of each other."""
        for scores in (self.first, self.second):
            _require_finite(scores)
        if self.second.shape[1] != self.first.shape[1] or len(self.second) not in (1, len(self.first)):
            raise ValueError(
                f"scores {self.first.shape} and {self.second.shape} are not of the same seeds and instances"
            )
        # Unpaired seeds are independent: each table contributes its own variance.
        if self.paired or len(self.second) == 1:
            return [self.first - self.second]
        return [self.first, -self.second]


@dataclass(frozen=True)
class Difference:
    """The mean score of the first minus that of the second, with statistics."""

    estimate: float
    interval: Interval | None
    """Confidence interval of the difference at `LEVEL`, not corrected for other contrasts; None with too few seeds."""
    p: float | None
    """Two-sided p-value, adjusted for the number of contrasts (Holm); None with too few seeds."""
    verdict: Verdict
    better: float
    """Probability of improvement: how often the first scores higher on an instance, with ties counted as one half."""


def judge(contrasts: Sequence[Contrast], families: Families, claim: Claim) -> list[Difference]:
    """The verdict on each contrast, corrected for the number of contrasts."""
    # A claim about a policy requires one seed, a claim about a way of training several.
    seeds = [len(contrast.first) for contrast in contrasts]
    if claim is not Claim.TRAINING and any(count != 1 for count in seeds):
        raise ValueError(f"a claim about {claim} takes the scores of one training seed")
    tables = [contrast.tables for contrast in contrasts]
    better = [
        probability_of_improvement(contrast.first, contrast.second, paired=contrast.paired) for contrast in contrasts
    ]
    if claim is Claim.TRAINING and any(count < FEWEST_SEEDS for count in seeds):
        means = [float(sum(table.mean() for table in summands)) for summands in tables]
        return [Difference(mean, None, None, Verdict.TOO_FEW, share) for mean, share in zip(means, better, strict=True)]

    # The verdict depends on the adjusted p-value; intervals are not adjusted.
    estimates = [_estimate_sum(summands, families) for summands in tables]
    adjusted = holm([p for _, p in estimates])
    differences: list[Difference] = []
    for (interval, _), p, share in zip(estimates, adjusted, better, strict=True):
        side = Verdict.ABOVE if interval.estimate > 0 else Verdict.BELOW
        verdict = Verdict.OPEN if p > SIGNIFICANCE else side
        differences.append(Difference(interval.estimate, interval, p, verdict, share))
    return differences


def mean_interval(values: Floats, families: Families) -> Interval:
    """Confidence interval of the mean of ``values [N, M]``; with one seed, only over instances."""
    _require_finite(values)
    return _estimate_sum([values], families)[0]


def _require_finite(scores: Floats) -> None:
    """Raise RunError if any of the ``scores [N, M]`` is not finite."""
    invalid = np.argwhere(~np.isfinite(scores))
    if len(invalid):
        seed, instance = invalid[0]
        raise RunError(
            f"the score of training seed {seed} on instance {instance} (from 0) is {scores[seed, instance]}, and no "
            "comparison follows from such scores: evaluate it again"
        )


def _estimate_sum(tables: Sequence[Floats], families: Families) -> tuple[Interval, float]:
    """The sum of the tables' means with its interval, and the two-sided p-value for the hypothesis that it is zero.

    The tables have independent seeds and the same instances.
    """
    # The parts of the variance with their degrees of freedom: S / N of each table, and the instances' part.
    parts = [(float(table.mean(1).var(ddof=1)) / len(table), len(table) - 1) for table in tables if len(table) > 1]
    parts.append(_estimate_instance_variance(tables, families))
    variance = sum(part for part, _ in parts)
    mean = float(sum(table.mean() for table in tables))
    if variance == 0:
        return Interval(mean, mean, mean), float(mean == 0)

    # Satterthwaite's formula in fractions of the variance, because the square of a tiny variance would be zero.
    freedom = 1 / sum((part / variance) ** 2 / degrees for part, degrees in parts)
    error = variance**0.5
    half = error * float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return Interval(mean, mean - half, mean + half), 2 * float(stats.t.sf(abs(mean) / error, freedom))


def _estimate_instance_variance(tables: Sequence[Floats], families: Families) -> tuple[float, int]:
    """The instances' part of the variance, ``max(B - R / N, 0) / M``, and its degrees of freedom."""
    instances = tables[0].shape[1]
    if families is None:
        if min(map(len, tables)) < 2:
            raise ValueError("where each seed has instances of its own, at least two seeds are needed")
        return 0.0, 1
    if instances < 2 or len(families) != instances:
        given = f"{plural(instances, 'instance')} with {plural(len(families), 'family', 'families')}"
        raise ValueError(f"{given}: give at least two, and a family each")
    names, member = np.unique(np.asarray(families), return_inverse=True)
    if 2 * len(names) > instances:
        # With too few instances per family to estimate the variance within families, all count as one family.
        names, member = names[:1], np.zeros_like(member)
    freedom = instances - len(names)
    shares = np.eye(len(names))[member]
    # Subtract each seed's mean in the family.
    centred = [table - table @ (shares / shares.sum(0)) @ shares.T for table in tables]
    # B is that of the summed tables, because they share the effects of instances; R / N is that of each table.
    between = float(np.square(np.sum([table.mean(0) for table in centred], axis=0)).sum()) / freedom
    residual = sum(
        float(np.square(table - table.mean(0)).sum()) / ((len(table) - 1) * freedom * len(table))
        for table in centred
        if len(table) > 1
    )
    return max(between - residual, 0.0) / instances, freedom


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple tests, which bounds the probability of any false positive (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    # Step down: no adjusted p-value may be smaller than that of a stronger contrast.
    stepped = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def interquartile_mean(values: Floats) -> float:
    """Mean of the middle half of all values: robust like a median, but less noisy (Agarwal et al., 2021)."""
    return float(stats.trim_mean(values.ravel(), TRIM))


def probability_of_improvement(first: Floats, second: Floats, *, paired: bool) -> float:
    """How often ``first [N, M]`` is above ``second``, ``[N, M]`` or ``[1, M]``, on an instance; ties count as one half.

    If not ``paired``, every seed of the first is compared with every seed of the second.
    """
    left, right = (first, second) if paired else (first[:, None], second[None])
    return float(np.where(left == right, 0.5, left > right).mean())
