"""How much a suite rewards control: the context-oracle gap.

The gap is the score of the best fixed schedule *per context* minus that of the best one overall, both chosen on one set
of instances and scored on another. If it is small, there is nothing for a controller to learn.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.control.rules import Planting, Schedule
from esper.errors import ConfigError, plural
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import Workers

Scores = dict[str, Floats]
"""Scores by name of the schedule, one per instance."""

FEWEST_SCORED = 2
"""Instances per variant for a standard error."""
CONTENDERS = 2
"""Single plantings per family that are combined into pairs and triples."""
NOTHING = "nothing"
"""Name of the schedule without plantings."""
LATE = 0.3
"""The late start of a single planting, as a fraction of the episode."""
MOST_PLANTINGS = 3


@dataclass(frozen=True)
class Choice:
    """The best fixed schedule of one context."""

    context: str
    schedule: str
    score: float
    score_of_overall: float
    """Mean score of the best schedule overall, on the same instances."""
    score_of_nothing: float


@dataclass(frozen=True)
class SuiteReport:
    """The value of control on a suite, on instances that were not used for choosing."""

    context_oracle_gap: float
    """Choosing a schedule by family, minus the best schedule overall."""
    standard_error: float
    variant_gap: float
    """Choosing a schedule by hidden variant, minus the best schedule overall."""
    variant_standard_error: float
    overall: str
    """Name of the best schedule overall."""
    overall_score: float
    nothing_score: float
    families: list[Choice]
    variants: list[Choice]
    schedules: int
    """Number of schedules compared."""
    episodes: int


def bench_suite(
    name: str,
    rules: Rules,
    search: int,
    score: int,
    plantings: int,
    seed: int,
    workers: Workers,
    show: Callable[[str], None],
) -> SuiteReport:
    """Measure the gap, with ``search`` instances per variant for choosing and ``score`` new ones for scoring.

    Single plantings are tried first, then combinations of up to ``plantings`` best in some family. ``show`` gets
    a line about each step.
    """
    if search < 1 or score < FEWEST_SCORED:
        raise ConfigError(
            f"--search {search} and --score {score}: take at least 1 instance to choose on, and at least "
            f"{FEWEST_SCORED} to score on, for a standard error"
        )
    suite = get_suite(name)
    chosen_on = instances_per_variant(suite, search, numpy_generator(seed, Stream.SUITE_SEARCH_INSTANCES))
    scored_on = instances_per_variant(suite, score, numpy_generator(seed, Stream.SUITE_SCORE_INSTANCES))

    def play(schedules: Sequence[Schedule], instances: Sequence[Instance]) -> Scores:
        results = evaluate_controllers(workers, schedules, EvaluationConfig(suite.name, rules), instances)
        return {
            schedule.name: np.array([record.score for record in result.records])
            for schedule, result in zip(schedules, results, strict=True)
        }

    singles = {schedule.name: schedule for schedule in single_schedules(suite)}
    show(f"1 of 3: {plural(len(singles), 'schedule')} of one planting at most, on {plural(len(chosen_on), 'instance')}")
    scores = play(list(singles.values()), chosen_on)

    families = np.array([instance.family for instance in chosen_on])
    contenders: set[str] = set()
    for family in set(families.tolist()):
        means = {name: table[families == family].mean() for name, table in scores.items() if name != NOTHING}
        contenders |= set(sorted(means, key=lambda name, means=means: -means[name])[:CONTENDERS])
    combined = combine_schedules(suite, [singles[name] for name in sorted(contenders)], plantings)
    show(f"2 of 3: {plural(len(combined), 'combination')} of the best, on {plural(len(chosen_on), 'instance')}")
    if combined:
        scores |= play(combined, chosen_on)
    schedules = singles | {schedule.name: schedule for schedule in combined}

    def score_afresh(names: Sequence[str]) -> Scores:
        show(f"3 of 3: {len(names)} chosen ones, on {plural(len(scored_on), 'other instance')}")
        return play([schedules[name] for name in names], scored_on)

    return measure_gap(scores, chosen_on, score_afresh, scored_on)


def measure_gap(
    scores: Scores,
    chosen_on: Sequence[Instance],
    score_afresh: Callable[[Sequence[str]], Scores],
    scored_on: Sequence[Instance],
) -> SuiteReport:
    """Choose schedules by their ``scores`` on ``chosen_on``, and score the chosen ones on others."""

    def name_contexts(instances: Sequence[Instance], *, by_variant: bool) -> list[str]:
        return [one.family + f"/{one.variant}" * by_variant for one in instances]

    def choose(weights: Floats) -> str:
        return max(scores, key=lambda name: float(scores[name] @ weights))

    def choose_by(contexts: Sequence[str]) -> dict[str, str]:
        labels = np.array(contexts)
        return {context: choose((labels == context).astype(float)) for context in sorted(set(contexts))}

    overall = choose(family_weights(chosen_on))
    by_family, by_variant = (choose_by(name_contexts(chosen_on, by_variant=fine)) for fine in (False, True))
    needed = sorted({overall, NOTHING, *by_family.values(), *by_variant.values()})
    fresh, weights = score_afresh(needed), family_weights(scored_on)

    def compare(chosen: dict[str, str], *, by_variant: bool) -> tuple[list[Choice], float, float]:
        """Choices, the weighted mean gap and its standard error from paired differences within contexts."""
        labels = np.array(name_contexts(scored_on, by_variant=by_variant))
        choices: list[Choice] = []
        gap, variance = 0.0, 0.0
        for context, name in chosen.items():
            rows = labels == context
            difference = fresh[name][rows] - fresh[overall][rows]
            # Contexts are independent, so their variances add up with the squares of their weights.
            share = float(weights[rows].sum())
            gap += share * float(difference.mean())
            variance += share**2 * float(difference.var(ddof=1)) / int(rows.sum())
            means = [float(fresh[schedule][rows].mean()) for schedule in (name, overall, NOTHING)]
            choices.append(Choice(context, name, *means))
        return choices, gap, variance**0.5

    families, gap, error = compare(by_family, by_variant=False)
    variants, variant_gap, variant_error = compare(by_variant, by_variant=True)
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
    # The split cycles through families and variants, so these are enough of each.
    most = max(len(suite.variants(family)) for family in suite.families) * len(suite.families) * count
    chosen: list[Instance] = []
    for instance in suite.sample(most, "heldout", rng):
        key = (instance.family, instance.variant)
        if counts[key]:
            counts[key] -= 1
            chosen.append(instance)
    return chosen


def family_weights(instances: Sequence[Instance]) -> Floats:
    """Weights of the instances, ``[N]``, that sum to 1 and give every family the same total."""
    families = [instance.family for instance in instances]
    names, index, counts = np.unique(families, return_inverse=True, return_counts=True)
    return 1.0 / (len(names) * counts[index])


# Schedules


def make_schedule(suite: Suite, plantings: Sequence[Planting]) -> Schedule:
    """The schedule with these plantings, named ``blueprint@slot+step``."""
    names = [
        f"{suite.blueprints[planting.blueprint]}@{planting.slot}" + (f"+{planting.step}" if planting.step else "")
        for planting in plantings
    ]
    return Schedule(plantings, suite.steps, " ".join(names) or NOTHING)


def single_schedules(suite: Suite) -> list[Schedule]:
    """The empty schedule, and every blueprint in every slot, early and late."""
    starts = (0, round(LATE * suite.steps))
    places = itertools.product(starts, range(len(suite.sites)), range(len(suite.blueprints)))
    return [make_schedule(suite, [])] + [make_schedule(suite, [Planting(*place)]) for place in places]


def combine_schedules(suite: Suite, singles: Sequence[Schedule], most: int = MOST_PLANTINGS) -> list[Schedule]:
    """Combinations of 2 to ``most`` single plantings with different slots and blueprints, planted at once."""
    places = sorted({(planting.slot, planting.blueprint) for single in singles for planting in single.plantings})
    return [
        make_schedule(suite, [Planting(0, *place) for place in together])
        for size in range(2, most + 1)
        for together in itertools.combinations(places, size)
        if all(len(set(values)) == size for values in zip(*together, strict=True))
    ]
