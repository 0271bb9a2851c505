"""Which of a module's hidden units earn their place: groups of them are left out in turn, by halves."""

from __future__ import annotations

import math
from collections.abc import Callable

from esper.growth.blueprints.units import Units


def prune_units(units: Units, keep: int, measure: Callable[[], float]) -> None:
    """Drop hidden units until ``keep`` are left: always the group without which the model does best.

    Units are ranked by the norm of their weights and cut into groups of neighbours. A group is a half of the units that
    are left, or as many as are still to go if these are fewer; the group with the smallest norms may have fewer units,
    since a smaller group is more easily done without. Of groups without which the model does equally well, the one with
    the smallest norms goes.

    Args:
        units: In a slot of the model.
        keep: Number of units to keep.
        measure: Returns the score of the model as it is; higher is better, and NaN is worst.
    """
    while (excess := len(ranked := units.rank_units()) - keep) > 0:
        size = max(1, min(excess, len(ranked) // 2))
        ends = range(len(ranked), 0, -size)
        groups = [ranked[max(end - size, 0) : end] for end in reversed(ends)]
        scores: list[float] = []
        for group in groups:
            units.kept[group] = False
            try:
                score = measure()
            finally:
                units.kept[group] = True
            scores.append(-math.inf if math.isnan(score) else score)
        units.kept[groups[scores.index(max(scores))]] = False  # the first of equals has the smallest norms
