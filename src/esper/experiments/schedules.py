"""Fixed schedules on a suite: what a controller could do without looking."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from esper.control.rules.schedule import Planting, Schedule
from esper.tasks.suite import Suite

NOTHING = "nothing"
"""Name of the schedule without plantings."""
LATE = 0.3
"""The late start of a single planting, as a share of the episode."""
MOST_PLANTINGS = 3


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
