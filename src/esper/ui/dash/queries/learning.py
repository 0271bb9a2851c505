"""How a controller learns."""

from __future__ import annotations

from typing import Any

from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.values import payload_of, plain

_LEFT_OUT = ("ppo/head_share/", "ppo/head_entropy_weight/", "ppo/head_clip_fraction/", "kept/")
"""Scalars that the view does not draw."""


def learning(reader: RunReader) -> dict[str, Any]:
    """All figures per iteration, the baselines' levels on the probe instances, and anomalies."""
    cursor, metadata = reader.last_id(), reader.metadata()
    figures: dict[str, dict[int, float | None]] = {}
    iterations: set[int] = set()
    for iteration, name, value in reader.rows("SELECT iteration, name, value FROM scalars"):
        if not str(name).startswith(_LEFT_OUT):
            figures.setdefault(str(name), {})[iteration] = plain(value)
            iterations.add(iteration)
    ordered = sorted(iterations)
    anomalies = reader.rows("SELECT payload FROM events WHERE type = 'anomaly_raised' ORDER BY id")
    return {
        "cursor": cursor,
        "total": plain(metadata.get("iterations")),
        "baselines": plain(metadata.get("baseline_levels", {})),
        "iterations": ordered,
        "series": {name: [values.get(iteration) for iteration in ordered] for name, values in sorted(figures.items())},
        "anomalies": [payload_of(text) for (text,) in anomalies],
    }
