"""Figures and tables of a comparison of configurations, and of a policy among all arms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.experiments.arms.crossed import crossed_interval
from esper.experiments.arms.outcome import Outcome
from esper.experiments.arms.standings import Standing
from esper.experiments.compare.finished import ARMS, RECORDS, Finished
from esper.experiments.statistics import Interval
from esper.ui.figures.record import Exhibit, Files
from esper.ui.figures.standings import Line, standing_exhibits
from esper.ui.formats import MEGA

_FIELDS = (
    "score, test_accuracy, added_parameters / host_parameters and flops, averaged over training seeds and instances; "
    "intervals are over both.\n"
)
CONFIGURATIONS = Files(f"CONFIGURATION/seed-N/{RECORDS} in the comparison's folder: {_FIELDS}")
ALL_ARMS = Files(
    f"FIRST-CONFIGURATION/{ARMS}/ARM.json and FIRST-CONFIGURATION/seed-N/{ARMS}/ARM.json in the comparison's folder, "
    f"the list records.outcomes: {_FIELDS}"
)


def contest_exhibits(found: Finished) -> list[Exhibit]:
    """Of the configurations, and of all arms if they have played."""
    first, played = next(iter(found.outcomes)), f"{len(found.families)} held-out instances"
    seeds = f"{len(found.seeds)} training seeds"
    about = f"all configurations, {seeds} each, on the same {played}"
    exhibits = standing_exhibits("configurations", about, first, CONFIGURATIONS, configuration_lines(found))
    if found.standings:
        about = f"the policies of {first} ({seeds}) and all other arms on the same {played}"
        exhibits += standing_exhibits("arms", about, "the policy", ALL_ARMS, [_of_arm(one) for one in found.standings])
    return exhibits


def configuration_lines(found: Finished) -> list[Line]:
    """The configurations, that which the others are compared with first."""
    pairs = {pair.second: pair for pair in found.pairs}
    lines: list[Line] = []
    for name in found.outcomes:
        pair = pairs.get(name)
        lines.append(
            Line(
                name,
                _interval(found, name, lambda one: one.score),
                _interval(found, name, lambda one: one.test_accuracy),
                _interval(found, name, lambda one: one.growth),
                pair and pair.difference,
                pair and pair.probability_of_improvement,
                pair and pair.p,
                _interval(found, name, lambda one: one.flops / MEGA).estimate,
            )
        )
    return lines


def _interval(found: Finished, name: str, measure: Callable[[Outcome], float]) -> Interval:
    values = np.array([[measure(one) for one in own] for own in found.outcomes[name]], np.float64)
    return crossed_interval(values, found.families)


def _of_arm(one: Standing) -> Line:
    against = one.against
    return Line(
        one.arm,
        one.score,
        one.accuracy,
        one.growth,
        against and against.difference,
        against and against.probability_of_improvement,
        against and against.p,
        one.flops.estimate / MEGA,
    )
