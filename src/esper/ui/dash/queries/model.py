"""One model that grows alone: all that its page draws."""

from __future__ import annotations

from typing import Any

from esper.telemetry.metric import SCORE, Metric, contributions
from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.episode import Episode
from esper.ui.dash.queries.lives import lives
from esper.ui.dash.queries.values import plain

_DESCRIBED = ("host", "task", "controller", "seed", "slots", "blueprints", "host_parameters", "iterations")
FIGURES = ("train_loss", "validation_loss", "added_parameters")
"""Scalars that are drawn, beside what growth is about."""


def model(reader: RunReader) -> dict[str, Any]:
    """What the model is, its decisions, its seeds' lives, and its figures by decision, from 1."""
    cursor, metadata = reader.last_id(), reader.metadata()
    described = {key: plain(metadata.get(key)) for key in _DESCRIBED}
    about = Metric.of(metadata)
    series = {
        **{name: name for name in FIGURES},
        "metric": about.scalar,
        "train_metric": about.train_scalar,
        "score": SCORE,
    }
    episode = Episode.of(reader, "grow", None)

    def told(event: str) -> list[dict[str, Any]]:
        return [] if episode is None else episode.payloads(reader, event, 0)

    transitions = told("lifecycle_transition")
    return {
        "cursor": cursor,
        **described,
        "about": {**plain(about.metadata()), "direction": about.direction, "contribution": contributions(metadata)},
        "decisions": told("step_taken"),
        "transitions": transitions,
        "seeds": lives(transitions),
        "gates": told("gate_judged"),
        "rollbacks": told("rolled_back"),
        "figures": {
            name: dict(plain([list(point) for point in reader.series(scalar)])) for name, scalar in series.items()
        },
    }
