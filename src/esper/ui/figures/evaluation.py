"""Figures and tables of an evaluated policy and the other controllers."""

from __future__ import annotations

from collections.abc import Mapping

from esper.experiments.comparison import Comparison, Standing
from esper.tasks.suite import Split
from esper.ui.figures.record import Exhibit, Files
from esper.ui.figures.standings import Line, standing_exhibits

_PLACES = {"heldout": "held-out instances", "transfer": "instances of families never trained on"}


def evaluation_exhibits(comparisons: Mapping[Split, Comparison]) -> list[Exhibit]:
    """Of each split that was played."""
    return [
        exhibit
        for split, comparison in comparisons.items()
        for exhibit in standing_exhibits(
            f"evaluation_{split}",
            f"all controllers on the same {comparison.instances} {_PLACES[split]}",
            "the policy",
            evaluation_source(split),
            [_line(one) for one in comparison.standings],
        )
    ]


def evaluation_source(split: Split) -> Files:
    """Where a split's figures come from."""
    return Files(
        f"evaluation.json in the run's directory, the records whose split is {split}: score, test_accuracy and "
        "added_parameters / host_parameters, averaged over the instances by controller; intervals are bootstrapped "
        "within families.\n"
    )


def _line(one: Standing) -> Line:
    against = one.against
    if against is None:
        return Line(one.controller, one.score, one.accuracy, one.growth, None, None, None)
    better = against.improvement.estimate
    return Line(one.controller, one.score, one.accuracy, one.growth, against.difference, better, against.p)
