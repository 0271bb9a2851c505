"""Several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from esper.errors import EsperError
from esper.experiments.statistics import LEVEL
from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.values import plain

FIGURES = {"train": "objective", "grow": "validation_accuracy"}
"""What is compared, by the command that made the run."""
LAST_SHARE = 3
"""The last one of so many parts of a run is what it is judged by."""


def comparison(stores: Mapping[str, Path | None]) -> list[dict[str, Any]]:
    """Each run's curve, its late level with an interval, and its last probe; or its `error`. None: it is not there."""
    return [
        _compared(name, store)
        if store is not None
        else {"name": name, "error": "there is no run of this name any more"}
        for name, store in stores.items()
    ]


def late_level(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean of the last third of ``values`` with Student's interval, as if iterations were independent.

    None where there is no value; no interval where there is but one.
    """
    late = np.array(values[-math.ceil(len(values) / LAST_SHARE) :] if values else [], float)
    if not late.size:
        return None
    level: dict[str, Any] = {"mean": float(late.mean()), "count": late.size, "low": None, "high": None}
    if late.size > 1:
        half = special.stdtrit(late.size - 1, (1 + LEVEL) / 2) * late.std(ddof=1) / math.sqrt(late.size)
        level |= {"low": level["mean"] - float(half), "high": level["mean"] + float(half)}
    return plain(level)


def _compared(name: str, store: Path) -> dict[str, Any]:
    try:
        with RunReader.open(store) as reader:
            metadata = reader.metadata()
            command = metadata.get("command", "train")
            figure = FIGURES.get(command, "objective") if isinstance(command, str) else "objective"
            series = [(iteration, value) for iteration, value in reader.series(figure) if math.isfinite(value)]
            probes = [(iteration, value) for iteration, value in reader.series("probe_score") if math.isfinite(value)]
            return {
                "name": name,
                "cursor": reader.last_id(),
                "figure": figure,
                "iterations": [iteration for iteration, _ in series],
                "values": [value for _, value in series],
                "late": late_level([value for _, value in series]),
                "probe": {"iteration": probes[-1][0], "score": probes[-1][1]} if probes else None,
                "baselines": plain(metadata.get("baseline_levels", {})),
            }
    except EsperError as error:
        return {"name": name, "error": str(error)}
