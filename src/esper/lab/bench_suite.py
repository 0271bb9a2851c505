"""How much a suite rewards control: the context-oracle gap.

The gap is the score of the best fixed schedule *per context* less that of the best fixed schedule overall. Both are
chosen on one set of instances and scored on another; where the gap is small there is nothing for a controller to learn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from esper.control.rules import Planting, Schedule
from esper.errors import ConfigError
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import Workers

Scores = dict[str, Floats]
"""Schedule name to scores, one per instance."""

FEWEST_SCORED = 2
"""Instances per variant that a standard error needs."""
CONTENDERS = 2
"""Single plantings taken from each family into pairs and triples."""


NOTHING = "nothing"
"""Name of the schedule without plantings."""
LATE = 0.3
"""The late start of a single planting, as a share of the episode."""
MOST_PLANTINGS = 3


@dataclass(frozen=True)
class Choice:
    """The best fixed schedule of one context."""

    context: str
    schedule: str
    score: float
    """Mean score on fresh instances of the context."""
    score_of_overall: float
    """Of the best schedule overall, on the same instances."""
    score_of_nothing: float


@dataclass(frozen=True)
class SuiteReport:
    """What control is worth on a suite. All scores are on instances that no choice was made on."""

    context_oracle_gap: float
    """Score of choosing by family, above the best schedule overall."""
    standard_error: float
    variant_gap: float
    """Score of choosing by hidden variant, above the best schedule overall."""
    variant_standard_error: float
    overall: str
    """The best schedule overall."""
    overall_score: float
    nothing_score: float
    families: list[Choice]
    variants: list[Choice]
    schedules: int
    """How many schedules competed."""
    episodes: int


def bench_suite(
    name: str, rules: Rules, search: int, score: int, seed: int, workers: Workers, show: Callable[[str], None]
) -> SuiteReport:
    """Measure the gap with ``search`` instances per variant to choose on and ``score`` fresh ones to score on.

    Single plantings are tried first; pairs and triples combine those that did best in some family. ``show`` is told
    what begins.

    Raises:
        ConfigError: there are too few instances.
    """
    if search < 1 or score < FEWEST_SCORED:
        raise ConfigError(
            f"--search {search} and --score {score}: ask for at least 1 instance to choose on and {FEWEST_SCORED} to "
            "score on, of which a standard error can be told"
        )
    suite = get_suite(name)
    chosen_on = instances_per_variant(suite, search, numpy_generator(seed, Stream.SUITE_SEARCH_INSTANCES))
    scored_on = instances_per_variant(suite, score, numpy_generator(seed, Stream.SUITE_SCORE_INSTANCES))

    singles = {schedule.name: schedule for schedule in single_schedules(suite)}
    show(f"1 of 3: {len(singles)} schedules of one planting at most, on {len(chosen_on)} instances")
    scores = _scores(workers, list(singles.values()), suite, rules, chosen_on)
    combined = combinations_of(suite, [singles[name] for name in _contenders(scores, chosen_on)])
    show(f"2 of 3: {len(combined)} combinations of the best, on {len(chosen_on)} instances")
    scores |= _scores(workers, combined, suite, rules, chosen_on)
    everything = singles | {schedule.name: schedule for schedule in combined}

    def score_afresh(names: Sequence[str]) -> Scores:
        show(f"3 of 3: {len(names)} chosen ones, on {len(scored_on)} other instances")
        return _scores(workers, [everything[name] for name in names], suite, rules, scored_on)

    return measure_gap(scores, chosen_on, score_afresh, scored_on)


def measure_gap(
    scores: Scores,
    chosen_on: Sequence[Instance],
    score_afresh: Callable[[Sequence[str]], Scores],
    scored_on: Sequence[Instance],
) -> SuiteReport:
    """Choose schedules by the scores ``scores`` on ``chosen_on``, and compare those chosen on other instances."""
    overall = _best(scores, family_weights(chosen_on))
    by_family = _best_per(scores, _families(chosen_on))
    by_variant = _best_per(scores, _variants(chosen_on))
    needed = sorted({overall, NOTHING, *by_family.values(), *by_variant.values()})
    fresh = score_afresh(needed)

    weights = family_weights(scored_on)
    families, gap, error = _compare(fresh, overall, by_family, _families(scored_on), weights)
    variants, variant_gap, variant_error = _compare(fresh, overall, by_variant, _variants(scored_on), weights)
    return SuiteReport(
        context_oracle_gap=gap,
        standard_error=error,
        variant_gap=variant_gap,
        variant_standard_error=variant_error,
        overall=overall,
        overall_score=float(fresh[overall] @ weights),
        nothing_score=float(fresh[NOTHING] @ weights),
        families=families,
        variants=variants,
        schedules=len(scores),
        episodes=len(scores) * len(chosen_on) + len(needed) * len(scored_on),
    )


def instances_per_variant(suite: Suite, count: int, rng: np.random.Generator) -> list[Instance]:
    """``count`` held-out instances of every variant of every training family."""
    counts = {(family, variant): count for family in suite.families for variant in suite.variants(family)}
    most = max(len(suite.variants(family)) for family in suite.families) * len(suite.families) * count
    chosen: list[Instance] = []
    for instance in suite.sample(most, "heldout", rng):
        key = (instance.family, instance.variant)
        if counts[key]:
            counts[key] -= 1
            chosen.append(instance)
    return chosen


def _scores(
    workers: Workers, schedules: Sequence[Schedule], suite: Suite, rules: Rules, instances: Sequence[Instance]
) -> Scores:
    played = evaluate_controllers(workers, schedules, EvaluationConfig(suite.name, rules), instances)
    return {
        schedule.name: np.array([record.score for record in one.records])
        for schedule, one in zip(schedules, played, strict=True)
    }


def _contenders(scores: Scores, instances: Sequence[Instance]) -> list[str]:
    """The plantings that were among the best in some family."""
    families = np.array(_families(instances))
    best: set[str] = set()
    for family in set(families.tolist()):
        rows = families == family
        ranked = sorted((name for name in scores if name != NOTHING), key=lambda name: -scores[name][rows].mean())
        best |= set(ranked[:CONTENDERS])
    return sorted(best)


def _families(instances: Sequence[Instance]) -> list[str]:
    return [instance.family for instance in instances]


def _variants(instances: Sequence[Instance]) -> list[str]:
    return [f"{instance.family}/{instance.variant}" for instance in instances]


def family_weights(instances: Sequence[Instance]) -> Floats:
    """Weights of the instances, ``[N]``, that sum to 1 and give every family the same share."""
    names, index, counts = np.unique(_families(instances), return_inverse=True, return_counts=True)
    return 1.0 / (len(names) * counts[index])


def _best(scores: Scores, weights: Floats) -> str:
    return max(scores, key=lambda name: float(scores[name] @ weights))


def _best_per(scores: Scores, labels: Sequence[str]) -> dict[str, str]:
    array = np.array(labels)
    return {label: _best(scores, (array == label).astype(float)) for label in sorted(set(labels))}


def _compare(
    fresh: Scores, overall: str, chosen: dict[str, str], labels: Sequence[str], weights: Floats
) -> tuple[list[Choice], float, float]:
    """Choices, the weighted mean gap and its standard error from the paired differences within contexts."""
    array = np.array(labels)
    choices: list[Choice] = []
    gap, variance = 0.0, 0.0
    for label, name in chosen.items():
        rows = array == label
        difference = fresh[name][rows] - fresh[overall][rows]
        share = float(weights[rows].sum())
        gap += share * float(difference.mean())
        variance += share**2 * float(difference.var(ddof=1)) / int(rows.sum())
        means = [float(fresh[one][rows].mean()) for one in (name, overall, NOTHING)]
        choices.append(Choice(label, name, *means))
    return choices, gap, variance**0.5


def single_schedules(suite: Suite) -> list[Schedule]:
    """Nothing, and every blueprint in every slot, early and late."""
    starts = (0, round(LATE * suite.steps))
    places = itertools.product(starts, range(len(suite.sites)), range(len(suite.blueprints)))
    return [schedule_of(suite, [])] + [schedule_of(suite, [Planting(*place)]) for place in places]


def combinations_of(suite: Suite, singles: Sequence[Schedule]) -> list[Schedule]:
    """Pairs and triples of the given single plantings that differ in slot and blueprint, each as early as can be."""
    places = sorted({(one.slot, one.blueprint) for schedule in singles for one in schedule.plantings})
    sizes = range(2, MOST_PLANTINGS + 1)
    return [
        schedule_of(suite, [Planting(0, *place) for place in chosen])
        for size in sizes
        for chosen in _without_repeats(places, size)
    ]


def schedule_of(suite: Suite, plantings: Sequence[Planting]) -> Schedule:
    """The schedule, under a name that tells what it plants: ``blueprint@slot+step``."""
    words = [
        f"{suite.blueprints[one.blueprint]}@{one.slot}" + (f"+{one.step}" if one.step else "") for one in plantings
    ]
    return Schedule(plantings, suite.steps, " ".join(words) or NOTHING)


def _without_repeats(places: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for chosen in itertools.combinations(places, size):
        slots, blueprints = zip(*chosen, strict=True)
        if len(set(slots)) == size and len(set(blueprints)) == size:
            yield chosen
