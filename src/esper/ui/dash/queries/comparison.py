"""Several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from esper.errors import EsperError
from esper.experiments.comparison import compare_splits
from esper.experiments.results import read_evaluation
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory, judged_by
from esper.ui.dash.queries.values import plain
from esper.ui.standings import evaluation_record

LAST_SHARE = 3
"""The last one of so many parts of a run is what it is judged by."""


def comparison(stores: Mapping[str, Path | None]) -> list[dict[str, Any]]:
    """Each run's curve, its late level, its last probe and what `esper evaluate` says of it; or its `error`.

    None: it is not there.
    """
    return [
        _compared(name, store)
        if store is not None
        else {"name": name, "error": "there is no run of this name any more"}
        for name, store in stores.items()
    ]


def late_level(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, lowest and highest of the last third of ``values``; None where there is no value.

    No interval: iterations of one run depend on each other, and other training seeds would do otherwise.
    """
    if not values:
        return None
    late = values[-math.ceil(len(values) / LAST_SHARE) :]
    return plain({"mean": mean(late), "count": len(late), "low": min(late), "high": max(late)})


def _compared(name: str, store: Path) -> dict[str, Any]:
    try:
        with RunReader.open(store) as reader:
            metadata = reader.metadata()
            metric, scalar = judged_by(metadata)
            series = [(iteration, value) for iteration, value in reader.series(scalar) if math.isfinite(value)]
            probes = [(iteration, value) for iteration, value in reader.series("probe_score") if math.isfinite(value)]
            return {
                "name": name,
                "cursor": reader.last_id(),
                "metric": metric.metric,
                "direction": metric.direction,
                "alone": metadata.get("command") == "grow",
                "iterations": [iteration for iteration, _ in series],
                "values": [value for _, value in series],
                "late": late_level([value for _, value in series]),
                "probe": {"iteration": probes[-1][0], "score": probes[-1][1]} if probes else None,
                "baselines": plain(metadata.get("baseline_levels", {})),
                "evaluation": _evaluation(RunDirectory(store.parent)),
            }
    except EsperError as error:
        return {"name": name, "error": str(error)}


def _evaluation(run: RunDirectory) -> dict[str, Any]:
    """The record that `esper evaluate --json` prints, by split; empty before the run is evaluated."""
    return plain(evaluation_record(compare_splits(read_evaluation(run.evaluation)))) if run.evaluation.exists() else {}
