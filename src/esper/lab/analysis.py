"""Is A better than B? The one analysis behind every comparison, in the terminal, on the page and as JSON.

Scores are ``[N, M]``: N training seeds, whose policies play M instances. Both count as drawn at random (Clark 1973,
"The language-as-fixed-effect fallacy"), since another training has another seed and other instances; families of
instances are fixed strata, whose balance is part of the design. In the two-way random-effects analysis of
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

With fewer than `FEWEST_SEEDS` there is no claim about which way of training is better: no interval of the difference,
no p, no verdict. With one seed a claim is still possible about that policy: where would it stand on other instances?

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

from esper.errors import RunError, plural
from esper.numerics.arrays import Floats

LEVEL = 0.95
SIGNIFICANCE = 1 - LEVEL
FEWEST_SEEDS = 5
"""For any claim about a way of training."""
TRIM = 0.25

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
    """What a comparison shows about the first of two."""

    ABOVE = "above"
    BELOW = "below"
    OPEN = "no difference shown"
    TOO_FEW = "too few seeds to say"


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
    def tables(self) -> list[Floats]:
        """Tables whose means add up to the difference, and whose seeds are independent of each other's.

        Raises:
            ValueError: the two do not belong together.
            RunError: a score is not finite.
        """
        for scores in (self.first, self.second):
            _require_finite(scores)
        if self.second.shape[1] != self.first.shape[1] or len(self.second) not in (1, len(self.first)):
            raise ValueError(
                f"scores {self.first.shape} and {self.second.shape} are not of the same seeds and instances"
            )
        # Unpaired seeds are independent: each table adds a variance of its own.
        if self.paired or len(self.second) == 1:
            return [self.first - self.second]
        return [self.first, -self.second]


@dataclass(frozen=True)
class Difference:
    """The first's mean score less the second's, and what follows."""

    estimate: float
    interval: Interval | None
    """Holds the true difference with probability `LEVEL`, taken by itself; None with too few seeds."""
    p: float | None
    """Two-sided p-value, adjusted for the number of contrasts (Holm); None with too few seeds."""
    verdict: Verdict
    better: float
    """Probability of improvement: how often the first scores higher on an instance; ties count half."""


def judge(contrasts: Sequence[Contrast], families: Families, claim: Claim) -> list[Difference]:
    """The verdict on each contrast; their number is corrected for.

    Raises:
        ValueError: not one family per instance, fewer than two instances (without families: seeds), tables that do not
            belong together, or several seeds where the claim is about one policy.
        RunError: a score is not finite.
    """
    # What the claim covers decides what it takes: one seed for a policy, several for a way of training.
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

    # The verdict follows from the adjusted p; each interval is taken by itself.
    estimates = [_estimate_sum(summands, families) for summands in tables]
    adjusted = holm([p for _, p in estimates])
    differences: list[Difference] = []
    for (interval, _), p, share in zip(estimates, adjusted, better, strict=True):
        side = Verdict.ABOVE if interval.estimate > 0 else Verdict.BELOW
        verdict = Verdict.OPEN if p > SIGNIFICANCE else side
        differences.append(Difference(interval.estimate, interval, p, verdict, share))
    return differences


def mean_interval(values: Floats, families: Families) -> Interval:
    """Where the mean of ``values [N, M]`` lies; of one seed, over other instances only.

    Raises:
        ValueError, RunError: see `judge`.
    """
    _require_finite(values)
    return _estimate_sum([values], families)[0]


def _require_finite(scores: Floats) -> None:
    """Refuse ``scores [N, M]`` from which no verdict follows."""
    invalid = np.argwhere(~np.isfinite(scores))
    if len(invalid):
        seed, instance = invalid[0]
        raise RunError(
            f"the score of training seed {seed} on instance {instance} (from 0) is {scores[seed, instance]}, and no "
            "comparison follows from such scores: evaluate it again"
        )


def _estimate_sum(tables: Sequence[Floats], families: Families) -> tuple[Interval, float]:
    """The sum of the tables' means with its interval, and the two-sided p-value that it is zero.

    The tables' seeds are independent, their instances the same.
    """
    # S / N of each table, and what instances add: each part of the variance with its degrees of freedom.
    parts = [(float(table.mean(1).var(ddof=1)) / len(table), len(table) - 1) for table in tables if len(table) > 1]
    parts.append(_estimate_instance_variance(tables, families))
    variance = sum(part for part, _ in parts)
    mean = float(sum(table.mean() for table in tables))
    if variance == 0:
        return Interval(mean, mean, mean), float(mean == 0)

    # Satterthwaite, by shares of the variance: the square of a tiny variance would be zero.
    freedom = 1 / sum((part / variance) ** 2 / degrees for part, degrees in parts)
    error = variance**0.5
    half = error * float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return Interval(mean, mean - half, mean + half), 2 * float(stats.t.sf(abs(mean) / error, freedom))


def _estimate_instance_variance(tables: Sequence[Floats], families: Families) -> tuple[float, int]:
    """``max(B - R / N, 0) / M``: what instances add beyond what shows in the seeds' means; its degrees of freedom."""
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
        # Too few instances of each family to estimate how they vary within it: all count as one family.
        names, member = names[:1], np.zeros_like(member)
    freedom = instances - len(names)
    shares = np.eye(len(names))[member]
    # Less each seed's mean in the family.
    centred = [table - table @ (shares / shares.sum(0)) @ shares.T for table in tables]
    # B of the summed tables, for luck of the instances is common to them; R / N of each table by itself.
    between = float(np.square(np.sum([table.mean(0) for table in centred], axis=0)).sum()) / freedom
    residual = sum(
        float(np.square(table - table.mean(0)).sum()) / ((len(table) - 1) * freedom * len(table))
        for table in centred
        if len(table) > 1
    )
    return max(between - residual, 0.0) / instances, freedom


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, so that the chance of any false alarm is bounded (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    # Step down: no p-value may be smaller than that of a stronger contrast.
    stepped = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def interquartile_mean(values: Floats) -> float:
    """Mean of the middle half of all values: as robust as a median, less noisy (Agarwal et al., 2021)."""
    return float(stats.trim_mean(values.ravel(), TRIM))


def probability_of_improvement(first: Floats, second: Floats, *, paired: bool) -> float:
    """How often ``first [N, M]`` is above ``second``, ``[N, M]`` or ``[1, M]``, on an instance; ties count half.

    Not paired, every seed of the one meets every seed of the other.
    """
    left, right = (first, second) if paired else (first[:, None], second[None])
    return float(np.where(left == right, 0.5, left > right).mean())
