"""Figures and tables of an evaluated policy and the other controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from esper.experiments.comparison import Comparison
from esper.tasks.suite import Split
from esper.ui.figures.record import Exhibit, Files
from esper.ui.figures.standings import standing_exhibits

PLACES = {"heldout": "held-out instances", "transfer": "instances of families never trained on"}


def evaluation_exhibits(comparisons: Mapping[Split, Comparison], source: Callable[[Split], Files]) -> list[Exhibit]:
    """Of each split that was played; ``source`` says where its figures come from."""
    return [
        exhibit
        for split, comparison in comparisons.items()
        for exhibit in standing_exhibits(
            f"evaluation_{split}",
            f"all controllers on the same {comparison.instances} {PLACES[split]}",
            source(split),
            comparison,
        )
    ]


def evaluation_source(split: Split) -> Files:
    """Where a split's figures come from."""
    return Files(
        f"evaluation.json in the run's directory, the records whose split is {split}: score, test_accuracy and "
        "added_parameters / host_parameters, averaged over the instances by controller; intervals are over "
        "instances, drawn within families.\n"
    )


def over_seeds_source(split: Split) -> Files:
    """The same of several runs."""
    return Files(
        f"evaluation.json in each run's directory, the records whose split is {split}: score, test_accuracy and "
        "added_parameters / host_parameters, averaged over the instances by controller, then over the runs; intervals "
        "are over runs, each of which has instances of its own.\n"
    )
