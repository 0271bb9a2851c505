"""Who scores how much, and who is better: controllers, arms or ways of training that played the same instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.control.learned import POLICY
from esper.lab.analysis import (
    Claim,
    Contrast,
    Difference,
    Interval,
    interquartile_mean,
    judge,
    mean_interval,
    probability_of_improvement,
)
from esper.numerics.arrays import Floats
from esper.tasks.suite import Split
from esper.train.results import SPLITS, Arm, Result, select_split


@dataclass(frozen=True)
class Entry:
    """One of those compared."""

    name: str
    seeds: Sequence[Sequence[Result]]
    """Its results on M instances for each of N training seeds; one list where it does not depend on seeds."""
    environment_steps: int | None = None
    """Decisions of single networks that finding it took; the mean over seeds."""

    def instances(self) -> list[list[str]]:
        """Names of what each seed played."""
        return [[one.instance for one in own] for own in self.seeds]


@dataclass(frozen=True)
class ReferenceDifference:
    """How far the reference is ahead of another one."""

    difference: Difference
    """Of the mean scores, the reference's less the other's."""
    better: float
    """Probability of improvement: how often the reference scores higher on an instance; ties count half."""


@dataclass(frozen=True)
class ArmSummary:
    """The figures of one of those compared: means over seeds and instances with 95% intervals."""

    name: str
    score: Interval
    middle: float
    """Interquartile mean of the score."""
    by_seed: tuple[float, ...]
    """Mean scores."""
    accuracy: Interval
    """Accuracy on test data."""
    growth: Interval
    """Added parameters over the host's."""
    flops: Interval | None
    environment_steps: int | None
    against: ReferenceDifference | None
    """Difference from the reference; None for the reference itself."""


@dataclass(frozen=True)
class Comparison:
    """The reference and all others on the same instances."""

    claim: Claim
    """What the verdicts are about."""
    seeds: int
    """Training seeds of the reference."""
    instances: int
    """Instances that each policy played."""
    standings: list[ArmSummary]
    family_scores: dict[str, dict[str, float]]
    """Mean score by family and name."""

    @property
    def reference(self) -> ArmSummary:
        """The arm with which the others are compared."""
        return next(one for one in self.standings if one.against is None)

    @property
    def others(self) -> list[tuple[ArmSummary, ReferenceDifference]]:
        """Everyone else, and how the reference does against them."""
        return [(one, one.against) for one in self.standings if one.against is not None]


def compare(entries: Sequence[Entry], claim: Claim, *, paired: bool, own_instances: bool = False) -> Comparison:
    """Compare the first entry with every other; each question costs power, so no others are asked.

    ``paired`` says whether the same number of a seed means the same training in all entries (arms that follow from a
    policy) or another one (ways of training); ``own_instances`` whether each seed played instances of its own.

    Raises:
        ValueError: they did not play the same instances, or `judge` refuses their scores.
    """
    reference, *others = entries
    played = reference.instances()
    if not own_instances and any(one != played[0] for one in played):
        raise ValueError(f"the policies of {reference.name} did not all play the same instances")
    for one in others:
        if one.instances() not in (played, played[:1]) or (own_instances and len(one.seeds) != len(played)):
            raise ValueError(f"{one.name} did not play the same instances as {reference.name}")
    families = None if own_instances else [one.family for one in reference.seeds[0]]
    own = _table(reference, _score)
    contrasts = [Contrast(own, _table(one, _score), paired) for one in others]
    against: list[ReferenceDifference | None] = [None]
    for contrast, difference in zip(contrasts, judge(contrasts, families, claim), strict=True):
        better = probability_of_improvement(contrast.first, contrast.second, paired=contrast.paired)
        against.append(ReferenceDifference(difference, better))
    standings = [_summarise_arm(one, families, of) for one, of in zip(entries, against, strict=True)]
    return Comparison(claim, len(played), len(played[0]), standings, _family_scores(entries))


def compare_evaluated(results: Sequence[Result]) -> Comparison:
    """A run's policy and all other controllers on the instances of one split, best mean score first.

    Raises:
        ValueError: the policy is missing, or a controller played other instances.
    """
    return _by_score(compare(_entries([results], POLICY), Claim.POLICY, paired=True))


def compare_controllers(results: Sequence[Result], reference: str) -> Comparison:
    """One controller and all others on the instances of one split, best mean score first; raises as above."""
    return _by_score(compare(_entries([results], reference), Claim.CONTROLLER, paired=True))


def compare_splits(results: Sequence[Result]) -> dict[Split, Comparison]:
    """The comparison on each split that a run was evaluated on."""
    return {split: compare_evaluated(found) for split in SPLITS if (found := select_split(results, split))}


def compare_configurations(arms: Sequence[Arm]) -> Comparison:
    """The first configuration and each other one, whose seeds are other trainings though they bear equal numbers."""
    return compare([Entry(arm.name, arm.outcomes) for arm in arms], Claim.TRAINING, paired=False)


def compare_arms(arms: Sequence[Arm]) -> Comparison:
    """The first arm, which is the policy, and each other one: what follows from a seed's policy is paired with it."""
    steps = [round(float(np.mean([one.environment_steps for one in arm.seeds]))) for arm in arms]
    entries = [Entry(arm.name, arm.outcomes, own) for arm, own in zip(arms, steps, strict=True)]
    return compare(entries, Claim.TRAINING, paired=True)


def compare_over_seeds(runs: Sequence[Sequence[Result]]) -> Comparison:
    """The same of several runs, which differ in their training seed and have played instances of their own.

    Raises:
        ValueError: fewer than two runs, other controllers or numbers of instances, or as `compare_evaluated`.
    """
    return _by_score(compare(_entries(runs, POLICY), Claim.TRAINING, paired=True, own_instances=True))


def _entries(runs: Sequence[Sequence[Result]], reference: str) -> list[Entry]:
    """Results by controller, the reference first."""
    names = dict.fromkeys(one.controller for results in runs for one in results)
    if reference not in names:
        raise ValueError(f"there are no results of {reference!r}")
    ordered = [reference, *(name for name in names if name != reference)]
    entries = [Entry(name, [[one for one in own if one.controller == name] for own in runs]) for name in ordered]
    if len({len(own) for own in entries[0].seeds}) > 1:
        raise ValueError("the runs have played different numbers of instances")
    return entries


def _by_score(comparison: Comparison) -> Comparison:
    return replace(comparison, standings=sorted(comparison.standings, key=lambda one: one.score.estimate, reverse=True))


def _summarise_arm(entry: Entry, families: Sequence[str] | None, against: ReferenceDifference | None) -> ArmSummary:
    def mean(measure: Callable[[Result], float]) -> Interval:
        return mean_interval(_table(entry, measure), families)

    scores = _table(entry, _score)
    has_flops = all(one.flops is not None for own in entry.seeds for one in own)
    return ArmSummary(
        entry.name,
        mean_interval(scores, families),
        interquartile_mean(scores),
        tuple(scores.mean(1).tolist()),
        mean(lambda one: one.test_accuracy),
        mean(lambda one: one.growth),
        mean(lambda one: one.flops or 0) if has_flops else None,
        entry.environment_steps,
        against,
    )


def _table(entry: Entry, measure: Callable[[Result], float]) -> Floats:
    """``[N, M]``."""
    return np.array([[measure(one) for one in own] for own in entry.seeds], np.float64)


def _score(one: Result) -> float:
    return one.score


def _family_scores(entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    families = sorted({one.family for entry in entries for own in entry.seeds for one in own})
    return {
        family: {
            entry.name: float(np.mean([one.score for own in entry.seeds for one in own if one.family == family]))
            for entry in entries
        }
        for family in families
    }
