"""One model that grows alone: all that its page draws."""

from __future__ import annotations

from typing import Any

from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.episode import Episode
from esper.ui.dash.queries.lives import lives
from esper.ui.dash.queries.values import plain

_DESCRIBED = ("host", "task", "controller", "seed", "slots", "blueprints", "host_parameters", "iterations", "metric")
FIGURES = ("train_loss", "train_accuracy", "validation_loss", "added_parameters")
"""Scalars that are drawn; the score is told with decisions."""


def model(reader: RunReader) -> dict[str, Any]:
    """What the model is, its decisions, its seeds' lives, and its figures by decision, from 1."""
    cursor, metadata = reader.last_id(), reader.metadata()
    described = {key: plain(metadata.get(key)) for key in _DESCRIBED}
    episode = Episode.of(reader, "grow", None)

    def told(event: str) -> list[dict[str, Any]]:
        return [] if episode is None else episode.payloads(reader, event, 0)

    transitions = told("lifecycle_transition")
    return {
        "cursor": cursor,
        **described,
        "decisions": told("step_taken"),
        "transitions": transitions,
        "seeds": lives(transitions),
        "gates": told("gate_judged"),
        "rollbacks": told("rolled_back"),
        "figures": {name: dict(plain([list(point) for point in reader.series(name)])) for name in FIGURES},
    }
