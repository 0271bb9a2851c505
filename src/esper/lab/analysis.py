"""Is A better than B? The one analysis that answers it, wherever it is asked.

Scores are ``[N, M]``: N training seeds, whose policies play M instances. Both count as drawn at random (Clark 1973,
"The language-as-fixed-effect fallacy"), since whoever trains again gets another seed and meets other instances;
families of instances are fixed strata, whose balance is part of the design. In the two-way random-effects analysis of
variance the mean of one table has the variance

    V = S / N + max(B - R / N, 0) / M

with S the variance of the seeds' means, B that of the instances' means and R that of what is left when both are taken
out, the latter two within families. S / N alone holds the luck of the seeds and of single episodes; the second term is
what instances do alike to every seed. Degrees of freedom are those of Satterthwaite (1946), the statistic is Student's.

How two tables are paired follows from what they share. Results of the same policies on the same instances (a policy
and its own actions shuffled), or of an arm that does not depend on training seeds, are subtracted: one table. Ways of
training share instances only: a seed's number fixes where a training begins, but learning amplifies the first
difference until nothing is left that would pair the two. Their seeds are independent, each way adds its own S / N
(Welch 1947), and B and R are those of the difference.

With fewer than `FEWEST_SEEDS` nothing is said of which way of training is better: no interval of the difference, no p,
no verdict. With one seed something can be said all the same, of that policy alone: where would it stand on other
instances?

Why not permute: of 5 seeds against 5 the smallest two-sided p is 2/252, of the signs of 5 it is 2/32; after Holm's
correction for eleven arms, nothing could be shown. Why not bootstrap: five values resampled know no degrees of freedom.
What it costs is that seeds' means have to be about normal. docs/experiments.md says how far that is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats

from esper.numerics.arrays import Floats

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


LEVEL = 0.95
SIGNIFICANCE = 1 - LEVEL
FEWEST_SEEDS = 5
"""For any claim about a way of training."""

Families = Sequence[str] | None
"""Of the M instances; None where every seed played instances of its own, whose luck is then part of the seed's."""


class Claim(StrEnum):
    """What a comparison is about."""

    POLICY = "this policy"
    """One training seed: other instances, the same policy."""
    CONTROLLER = "this controller"
    """However it came about: other instances, the same controller."""
    TRAINING = "this way of training"
    """Other training seeds and other instances."""


class Verdict(StrEnum):
    """What may be said of the first of two."""

    ABOVE = "above"
    BELOW = "below"
    OPEN = "no difference shown"
    TOO_FEW = "too few seeds to say"


@dataclass(frozen=True)
class Contrast:
    """Scores of two on the same instances."""

    first: Floats
    """``[N, M]``."""
    second: Floats
    """``[N, M]``, or ``[1, M]`` of what does not depend on training seeds."""
    paired: bool
    """Whether row n of both comes from the same training; a second of one row is paired with every row."""

    @property
    def seeds(self) -> int:
        """N."""
        return len(self.first)

    @property
    def tables(self) -> list[Floats]:
        """Whose means add up to the difference, and whose seeds are independent of each other's.

        Raises:
            ValueError: the two do not belong together.
        """
        if self.second.shape[1] != self.first.shape[1] or len(self.second) not in (1, len(self.first)):
            raise ValueError(
                f"scores {self.first.shape} and {self.second.shape} are not of the same seeds and instances"
            )
        if self.paired or len(self.second) == 1:
            return [self.first - self.second]
        return [self.first, -self.second]


@dataclass(frozen=True)
class Difference:
    """The first's mean score less the second's, and what follows."""

    estimate: float
    interval: Interval | None
    """Holds the true difference with probability `LEVEL`, taken by itself; None where there are too few seeds."""
    p: float | None
    """Two-sided, that there is no difference, adjusted for the number of contrasts (Holm); None likewise."""
    verdict: Verdict


def mean_interval(values: Floats, families: Families) -> Interval:
    """Where the mean of ``values [N, M]`` lies; of one seed, over other instances only.

    Raises:
        ValueError: see `judge`.
    """
    return _Spread.of([values], families).interval


def judge(contrasts: Sequence[Contrast], families: Families, claim: Claim) -> list[Difference]:
    """The verdict on each contrast; their number is corrected for.

    Raises:
        ValueError: not one family per instance, fewer than two instances (without families: seeds), tables that do not
            belong together, or several seeds where the claim is about one policy.
    """
    if claim is not Claim.TRAINING and any(one.seeds != 1 for one in contrasts):
        raise ValueError(f"a claim about {claim} takes the scores of one training seed")
    if claim is Claim.TRAINING and any(one.seeds < FEWEST_SEEDS for one in contrasts):
        return [
            Difference(float(sum(table.mean() for table in one.tables)), None, None, Verdict.TOO_FEW)
            for one in contrasts
        ]
    spreads = [_Spread.of(one.tables, families) for one in contrasts]
    adjusted = holm([one.p for one in spreads])
    return [
        Difference(one.mean, one.interval, p, _verdict(one.mean, p)) for one, p in zip(spreads, adjusted, strict=True)
    ]


def _verdict(mean: float, p: float) -> Verdict:
    if p > SIGNIFICANCE:
        return Verdict.OPEN
    return Verdict.ABOVE if mean > 0 else Verdict.BELOW


@dataclass(frozen=True)
class _Spread:
    """A mean with its standard error and degrees of freedom."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, tables: Sequence[Floats], families: Families) -> _Spread:
        """The spread of the sum of the tables' means; their seeds are independent, their instances the same."""
        parts = [(float(one.mean(1).var(ddof=1)) / len(one), len(one) - 1) for one in tables if len(one) > 1]
        parts.append(_of_instances(tables, families))
        variance = sum(part for part, _ in parts)
        mean = float(sum(one.mean() for one in tables))
        if variance == 0:
            return cls(mean, 0.0, 1.0)
        # Shares instead of variances: the square of a tiny one would be zero.
        return cls(mean, variance**0.5, 1 / sum((part / variance) ** 2 / freedom for part, freedom in parts))

    @property
    def interval(self) -> Interval:
        half = self.error * float(stats.t.ppf((1 + LEVEL) / 2, self.freedom)) if self.error else 0.0
        return Interval(self.mean, self.mean - half, self.mean + half)

    @property
    def p(self) -> float:
        if self.error == 0:
            return float(self.mean == 0)
        return 2 * float(stats.t.sf(abs(self.mean) / self.error, self.freedom))


def _of_instances(tables: Sequence[Floats], families: Families) -> tuple[float, int]:
    """What instances add to the variance beyond what shows in the seeds' means, and the degrees of freedom of that."""
    instances = tables[0].shape[1]
    if families is None:
        if min(map(len, tables)) < 2:
            raise ValueError("where each seed has instances of its own, at least two seeds are needed")
        return 0.0, 1
    if instances < 2 or len(families) != instances:
        raise ValueError(f"{instances} instances with {len(families)} families: give at least two, and a family each")
    names, member = np.unique(np.asarray(families), return_inverse=True)
    if 2 * len(names) > instances:
        names, member = names[:1], np.zeros_like(member)  # too few of each to tell how they vary within: as one family
    freedom = instances - len(names)
    shares = np.eye(len(names))[member]
    centred = [one - one @ (shares / shares.sum(0)) @ shares.T for one in tables]  # less each seed's mean in the family
    between = float(np.square(np.sum([one.mean(0) for one in centred], axis=0)).sum()) / freedom
    rest = sum(
        float(np.square(one - one.mean(0)).sum()) / ((len(one) - 1) * freedom * len(one))
        for one in centred
        if len(one) > 1
    )
    return max(between - rest, 0.0) / instances, freedom
