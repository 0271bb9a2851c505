"""All figures and tables of a run or a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.experiments.comparison import Comparison
from esper.practice.result import GrowResult
from esper.tasks.suite import Split
from esper.ui.figures import growing, grown, grown_tables, learning, tables
from esper.ui.figures.about import named
from esper.ui.figures.evaluation import evaluation_exhibits, evaluation_source
from esper.ui.figures.record import Exhibit, measured


def training_exhibits(store: Path, comparisons: Mapping[Split, Comparison]) -> list[Exhibit]:
    """Of a run of `esper train`, evaluated or not.

    Raises:
        RunError: its store is missing, damaged or not ours.
    """
    queried = measured(store, (*learning.FIGURES, *growing.FIGURES, *tables.TABLES))
    return [*queried, *evaluation_exhibits(comparisons, evaluation_source)]


def grown_exhibits(store: Path, metadata: Mapping[str, Any], result: GrowResult | None) -> list[Exhibit]:
    """Of a run of `esper grow`, whose result is None before it ends; raises as `training_exhibits`."""
    return [*own_exhibits(store, metadata), *grown_tables.result_exhibits(result)]


def own_exhibits(store: Path, metadata: Mapping[str, Any]) -> list[Exhibit]:
    """Of a model that grew in a loop of its owner's, where Esper tests nothing; raises as `training_exhibits`."""
    return [named(one, metadata) for one in measured(store, (*grown.FIGURES, *grown_tables.TABLES))]
