"""All figures and tables of a run or a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.experiments.behaviour import Behaviour
from esper.experiments.comparison import Comparison
from esper.practice.result import GrowResult
from esper.tasks.suite import Split
from esper.ui.figures import growing, grown, grown_tables, learning, tables
from esper.ui.figures.about import named
from esper.ui.figures.behaviour import exhibit_behaviour
from esper.ui.figures.record import Exhibit, measured
from esper.ui.figures.standings import evaluation_source, exhibit_evaluation


def training_exhibits(
    store: Path, comparisons: Mapping[Split, Comparison], behaviour: Behaviour | None = None
) -> list[Exhibit]:
    """Of a run of `esper train`, evaluated or not.

    Raises:
        RunError: its store is missing, damaged or not ours.
    """
    queried = measured(store, (*learning.FIGURES, *growing.FIGURES, *tables.TABLES))
    evaluated = exhibit_evaluation(comparisons, evaluation_source).values()
    did = [] if behaviour is None else exhibit_behaviour(behaviour).all()
    return [*queried, *(one for each in evaluated for one in each.all()), *did]


def grown_exhibits(store: Path, metadata: Mapping[str, Any], result: GrowResult | None) -> list[Exhibit]:
    """Of a run of `esper grow`, whose result is None before it ends; raises as `training_exhibits`."""
    return [*own_exhibits(store, metadata), *grown_tables.result_exhibits(result)]


def own_exhibits(store: Path, metadata: Mapping[str, Any]) -> list[Exhibit]:
    """Of a model that grew in a loop of its owner's, where Esper tests nothing; raises as `training_exhibits`."""
    return [named(one, metadata) for one in measured(store, (*grown.FIGURES, *grown_tables.TABLES))]
