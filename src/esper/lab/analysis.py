"""Is A better than B? The statistical analysis of all comparisons, in the terminal, in reports and as JSON.

Scores are ``[N, M]``: N training seeds, whose policies run on M instances, both random samples (Clark 1973, "The
language-as-fixed-effect fallacy"). Families of instances are fixed strata. In the two-way random-effects analysis of
variance, the mean of one table has the variance

    V = S / N + max(B - R / N, 0) / M

where S is the variance of the seeds' means, B that of the instances' means, and R the residual variance, the latter two
within families. The degrees of freedom are those of Satterthwaite (1946), the statistic is Student's t.

Results of the same policies on the same instances (a policy and its own actions shuffled), or of an arm without
training seeds, are subtracted and give one table. Ways of training share only instances, since learning amplifies the
first difference until equal seeds are unrelated: each contributes its own S / N (Welch 1947), and B and R are those of
the difference. With fewer than `FEWEST_SEEDS` seeds, nothing is claimed about ways of training.

A permutation test could show nothing: with 5 seeds against 5 its smallest two-sided p-value is 2/252, before Holm's
correction for eleven arms. The price is that seeds' means must be approximately normal (docs/experiments.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from scipy import stats

from esper.control.learned import POLICY
from esper.errors import RunError, plural
from esper.numerics.arrays import Floats
from esper.tasks.suite import Split
from esper.train.results import SPLITS, Arm, ArmRecord, Result, select_split

LEVEL = 0.95
SIGNIFICANCE = 1 - LEVEL
FEWEST_SEEDS = 5
"""Smallest number of seeds for any claim about a way of training."""
TRIM = 0.25

Families = Sequence[str] | None
"""Families of the M instances; None if every seed has its own instances, which then count as a part of the seed."""


class Claim(StrEnum):
    """What a comparison is about: one trained policy, a given controller, or other trainings."""

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
    """Scores of two contenders on the same instances, ``[N, M]``; the second's ``[1, M]`` without training seeds."""

    first: Floats
    """``[N, M]``."""
    second: Floats
    """``[N, M]``, or ``[1, M]`` if the scores do not depend on training seeds."""
    paired: bool
    """Whether row n of both is from the same training; a second table of one row is paired with every row."""

    def split_tables(self) -> list[Floats]:
        """Tables whose means add up to the difference, and whose seeds are independent of each other."""
        for scores in (self.first, self.second):
            _require_finite(scores)
        if self.second.shape[1] != self.first.shape[1] or len(self.second) not in (1, len(self.first)):
            raise ValueError(f"scores {self.first.shape} and {self.second.shape} differ in seeds or instances")
        # Unpaired seeds are independent: each table contributes its own variance.
        if self.paired or len(self.second) == 1:
            return [self.first - self.second]
        return [self.first, -self.second]


@dataclass(frozen=True)
class Difference:
    """The mean score of the first minus that of the second; no interval and no p-value with too few seeds."""

    estimate: float
    interval: Interval | None
    """At `LEVEL`, not corrected for other contrasts; None with too few seeds."""
    p: float | None
    """Two-sided, adjusted for the number of contrasts (Holm)."""
    verdict: Verdict
    better: float
    """`probability_of_improvement`."""


def estimate_differences(contrasts: Sequence[Contrast], families: Families, claim: Claim) -> list[Difference]:
    """The difference of each contrast with its verdict, corrected for the number of contrasts."""
    seeds = [len(contrast.first) for contrast in contrasts]
    if claim is not Claim.TRAINING and any(count != 1 for count in seeds):
        raise ValueError(f"a claim about {claim} takes the scores of one training seed")
    tables = [contrast.split_tables() for contrast in contrasts]
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
    invalid = np.argwhere(~np.isfinite(scores))
    if len(invalid):
        seed, instance = invalid[0]
        raise RunError(
            f"the score of training seed {seed} on instance {instance} (from 0) is {scores[seed, instance]}, which "
            "cannot be compared: evaluate it again"
        )


def _estimate_sum(tables: Sequence[Floats], families: Families) -> tuple[Interval, float]:
    """The sum of the means of tables with independent seeds, and its two-sided p-value against zero."""
    # The parts of the variance with their degrees of freedom: S / N of each table, and the instances' part.
    parts = [(float(table.mean(1).var(ddof=1)) / len(table), len(table) - 1) for table in tables if len(table) > 1]
    parts.append(_estimate_instance_variance(tables, families))
    variance = sum(part for part, _ in parts)
    mean = float(sum(table.mean() for table in tables))
    if variance == 0:
        return Interval(mean, mean, mean), float(mean == 0)

    # Satterthwaite's formula in fractions of the variance: the square of a tiny variance would be zero.
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
        # Too few instances per family to estimate the variance within families: all count as one family.
        names, member = names[:1], np.zeros_like(member)
    freedom = instances - len(names)
    shares = np.eye(len(names))[member]
    centred = [table - table @ (shares / shares.sum(0)) @ shares.T for table in tables]
    # B is that of the summed tables, which share the effects of instances, R / N that of each table.
    between = float(np.square(np.sum([table.mean(0) for table in centred], axis=0)).sum()) / freedom
    residual = sum(
        float(np.square(table - table.mean(0)).sum()) / ((len(table) - 1) * freedom * len(table))
        for table in centred
        if len(table) > 1
    )
    return max(between - residual, 0.0) / instances, freedom


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that any false positive is improbable (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    # No adjusted p-value may be smaller than that of a stronger contrast.
    stepped = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def interquartile_mean(values: Floats) -> float:
    """Mean of the middle half of all values (Agarwal et al., 2021)."""
    return float(stats.trim_mean(values.ravel(), TRIM))


def probability_of_improvement(first: Floats, second: Floats, *, paired: bool) -> float:
    """How often ``first [N, M]`` is above ``second``, ``[N, M]`` or ``[1, M]``; ties count one half.

    If not ``paired``, every seed of the first is compared with every seed of the second.
    """
    left, right = (first, second) if paired else (first[:, None], second[None])
    return float(np.where(left == right, 0.5, left > right).mean())


@dataclass(frozen=True)
class Entry:
    """The results of one contender on M instances, for each of N training seeds or one list without them."""

    name: str
    seeds: Sequence[Sequence[Result]]
    """Results on M instances for each of N training seeds; one list without training seeds."""
    environment_steps: int | None = None
    """Mean number of decisions, over all networks, that finding the contender took."""

    @property
    def instances(self) -> list[list[str]]:
        """Names of the instances of each seed."""
        return [[result.instance for result in results] for results in self.seeds]

    def tabulate(self, measure: Callable[[Result], float]) -> Floats:
        """``measure`` of each result, ``[N, M]``."""
        return np.array([[measure(result) for result in results] for results in self.seeds], np.float64)


@dataclass(frozen=True)
class Comparison:
    """The reference and all other contenders on the same instances."""

    claim: Claim
    seeds: int
    """Number of training seeds of the reference."""
    instances: int
    """Number of instances for each policy."""
    standings: list[ArmRecord]
    verdicts: dict[str, Verdict]
    """The reference against each other arm, by the name of that arm."""
    family_scores: dict[str, dict[str, float]]
    """Mean score by family and name."""

    @property
    def reference(self) -> ArmRecord:
        """The arm with which the others are compared."""
        return next(arm for arm in self.standings if arm.name not in self.verdicts)

    @property
    def others(self) -> list[ArmRecord]:
        """All arms that the reference is compared with."""
        return [arm for arm in self.standings if arm.name in self.verdicts]


def compare(entries: Sequence[Entry], claim: Claim, *, paired: bool, own_instances: bool = False) -> Comparison:
    """Compare the first entry with every other; more comparisons would cost statistical power.

    With ``paired``, equal seeds mean the same training in all entries; with ``own_instances``, each has its own.
    """
    reference, *others = entries
    played = reference.instances
    if not own_instances and any(instances != played[0] for instances in played):
        raise ValueError(f"the policies of {reference.name} did not all play the same instances")
    for entry in others:
        if entry.instances not in (played, played[:1]) or (own_instances and len(entry.seeds) != len(played)):
            raise ValueError(f"{entry.name} did not play the same instances as {reference.name}")

    # A run's own instances are part of its random effect, so there are no strata.
    families = None if own_instances else [result.family for result in reference.seeds[0]]
    scores = [entry.tabulate(lambda result: result.score) for entry in entries]
    differences = estimate_differences([Contrast(scores[0], table, paired) for table in scores[1:]], families, claim)

    def summarise_arm(entry: Entry, table: Floats, difference: Difference | None) -> ArmRecord:
        measures: dict[str, Callable[[Result], float]] = {
            "score": lambda result: result.score,
            "accuracy": lambda result: result.test_accuracy,
            "added": lambda result: result.growth,
        }
        if all(result.flops is not None for results in entry.seeds for result in results):
            measures["flops"] = lambda result: result.flops or 0
        figures: dict[str, Any] = {"flops": None, "flops_interval": None}
        for name, measure in measures.items():
            mean = mean_interval(entry.tabulate(measure), families)
            figures |= {name: mean.estimate, f"{name}_interval": (mean.low, mean.high)}
        interval = difference and difference.interval
        winners = {Verdict.ABOVE: f"{reference.name} better", Verdict.BELOW: f"{entry.name} better"}
        return ArmRecord(
            name=entry.name,
            **figures,
            interquartile_mean=interquartile_mean(table),
            by_seed=tuple(table.mean(1).tolist()),
            environment_steps=entry.environment_steps,
            difference=difference and difference.estimate,
            difference_interval=interval and (interval.low, interval.high),
            p=difference and difference.p,
            probability_of_improvement=difference and difference.better,
            verdict=difference and winners.get(difference.verdict, str(difference.verdict)),
        )

    standings = list(map(summarise_arm, entries, scores, [None, *differences]))
    verdicts = {entry.name: difference.verdict for entry, difference in zip(others, differences, strict=True)}

    results = {entry.name: [result for seed in entry.seeds for result in seed] for entry in entries}
    family_scores = {
        family: {
            name: float(np.mean([result.score for result in arm_results if result.family == family]))
            for name, arm_results in results.items()
        }
        for family in sorted({result.family for arm_results in results.values() for result in arm_results})
    }
    return Comparison(claim, len(played), len(played[0]), standings, verdicts, family_scores)


def compare_splits(results: Sequence[Result]) -> dict[Split, Comparison]:
    by_split: dict[Split, list[Result]] = {split: select_split(results, split) for split in SPLITS}
    return {split: compare_controllers([played]) for split, played in by_split.items() if played}


def compare_controllers(
    runs: Sequence[Sequence[Result]], reference: str = POLICY, claim: Claim = Claim.POLICY
) -> Comparison:
    """Compare the reference with every other controller of the same runs on one split, best mean score first.

    Several runs have different training seeds and their own instances.
    """
    names = dict.fromkeys(result.controller for results in runs for result in results)
    if reference not in names:
        raise ValueError(f"there are no results of {reference!r}")
    entries = [
        Entry(name, [[result for result in results if result.controller == name] for results in runs])
        for name in (reference, *(name for name in names if name != reference))
    ]
    if len({len(results) for results in entries[0].seeds}) > 1:
        raise ValueError("the runs have played different numbers of instances")
    comparison = compare(entries, claim, paired=True, own_instances=claim is Claim.TRAINING)
    return replace(comparison, standings=sorted(comparison.standings, key=lambda arm: arm.score, reverse=True))


def compare_configurations(arms: Sequence[Arm]) -> Comparison:
    """Compare the first configuration with each other one."""
    return compare([Entry(arm.name, arm.outcomes) for arm in arms], Claim.TRAINING, paired=False)


def compare_arms(arms: Sequence[Arm]) -> Comparison:
    """Compare the first arm, the policy, with each other one."""
    entries = [
        Entry(arm.name, arm.outcomes, round(float(np.mean([seed.environment_steps for seed in arm.seeds]))))
        for arm in arms
    ]
    return compare(entries, Claim.TRAINING, paired=True)
