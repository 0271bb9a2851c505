"""Compare controllers, arms or ways of training on the same instances: scores, and which is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.control.learned import POLICY
from esper.lab.analysis import Claim, Contrast, Difference, Verdict, interquartile_mean, judge, mean_interval
from esper.numerics.arrays import Floats
from esper.tasks.suite import Split
from esper.train.results import SPLITS, Arm, ArmRecord, Bounds, Result, select_split


@dataclass(frozen=True)
class Entry:
    """The results of one contender in a comparison."""

    name: str
    seeds: Sequence[Sequence[Result]]
    """Results on M instances for each of N training seeds; one list if the contender does not depend on seeds."""
    environment_steps: int | None = None
    """Number of decisions, over all networks, that finding the contender took; the mean over seeds."""

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
    """What the verdicts are about."""
    seeds: int
    """Number of training seeds of the reference."""
    instances: int
    """Number of instances for each policy."""
    standings: list[ArmRecord]
    verdicts: dict[str, Verdict]
    """Verdicts on the reference against each other arm, by the name of that arm."""
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
    """Compare the first entry with every other, and no others, because each comparison costs statistical power.

    With ``paired``, equal seeds mean the same training in all entries (arms that depend on a policy), otherwise
    different ones (ways of training). With ``own_instances``, each seed has its own instances.
    """
    # A difference is meaningful only on the same instances.
    reference, *others = entries
    played = reference.instances
    if not own_instances and any(instances != played[0] for instances in played):
        raise ValueError(f"the policies of {reference.name} did not all play the same instances")
    for entry in others:
        if entry.instances not in (played, played[:1]) or (own_instances and len(entry.seeds) != len(played)):
            raise ValueError(f"{entry.name} did not play the same instances as {reference.name}")

    # If each run has its own instances, they are part of the run's random effect, so there are no strata.
    families = None if own_instances else [result.family for result in reference.seeds[0]]
    scores = [entry.tabulate(lambda result: result.score) for entry in entries]
    differences = judge([Contrast(scores[0], table, paired) for table in scores[1:]], families, claim)

    def summarise_arm(entry: Entry, table: Floats, difference: Difference | None) -> ArmRecord:
        def estimate(measure: Callable[[Result], float]) -> tuple[float, Bounds]:
            interval = mean_interval(entry.tabulate(measure), families)
            return interval.estimate, (interval.low, interval.high)

        score, score_interval = estimate(lambda result: result.score)
        accuracy, accuracy_interval = estimate(lambda result: result.test_accuracy)
        added, added_interval = estimate(lambda result: result.growth)
        flops, flops_interval = None, None
        if all(result.flops is not None for results in entry.seeds for result in results):
            flops, flops_interval = estimate(lambda result: result.flops or 0)
        interval = difference and difference.interval
        winners = {Verdict.ABOVE: f"{reference.name} better", Verdict.BELOW: f"{entry.name} better"}
        return ArmRecord(
            name=entry.name,
            score=score,
            score_interval=score_interval,
            interquartile_mean=interquartile_mean(table),
            by_seed=tuple(table.mean(1).tolist()),
            accuracy=accuracy,
            accuracy_interval=accuracy_interval,
            added=added,
            added_interval=added_interval,
            flops=flops,
            flops_interval=flops_interval,
            environment_steps=entry.environment_steps,
            difference=difference and difference.estimate,
            difference_interval=interval and (interval.low, interval.high),
            p=difference and difference.p,
            probability_of_improvement=difference and difference.better,
            verdict=difference and winners.get(difference.verdict, str(difference.verdict)),
        )

    standings = list(map(summarise_arm, entries, scores, [None, *differences]))
    verdicts = {entry.name: difference.verdict for entry, difference in zip(others, differences, strict=True)}

    # Families are averaged over all results of a contender, whatever the seed.
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
    """The comparison on each split on which a run was evaluated."""
    by_split: dict[Split, list[Result]] = {split: select_split(results, split) for split in SPLITS}
    return {split: compare_controllers([played]) for split, played in by_split.items() if played}


def compare_controllers(
    runs: Sequence[Sequence[Result]], reference: str = POLICY, claim: Claim = Claim.POLICY
) -> Comparison:
    """Compare the reference with every other controller of the same runs on one split, best mean score first.

    Several runs have different training seeds and their own instances.
    """
    # In the order of the results, so that equal scores keep it.
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
    """Compare the first configuration with each other one; equal seeds of two configurations are not paired."""
    return compare([Entry(arm.name, arm.outcomes) for arm in arms], Claim.TRAINING, paired=False)


def compare_arms(arms: Sequence[Arm]) -> Comparison:
    """Compare the first arm, the policy, with each other one; arms that depend on a seed's policy are paired."""
    entries = [
        Entry(arm.name, arm.outcomes, round(float(np.mean([seed.environment_steps for seed in arm.seeds]))))
        for arm in arms
    ]
    return compare(entries, Claim.TRAINING, paired=True)
