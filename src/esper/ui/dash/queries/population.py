"""All networks of an episode."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.episode import Episode
from esper.ui.dash.queries.values import plain

STEP_FIELDS = ("step", "op", "slot", "metric", "objective", "stages", "blueprints", "alphas", "contributions")
_STARTED_FIELDS = ("instance", "family", "variant")


def population(reader: RunReader, number: int | None) -> dict[str, Any]:
    """The networks of an episode, the newest where none is given: what each learns and how it stood at each step."""
    cursor, metadata = reader.last_id(), reader.metadata()
    episode = Episode.of(reader, metadata.get("command", ""), number)
    return {
        "cursor": cursor,
        "slots": plain(metadata.get("slots", [])),
        "environments": plain(metadata.get("environments")),
        "steps": plain(metadata.get("steps")),
        "episode": None
        if episode is None
        else {"number": episode.number, "first": episode.first, "last": episode.last},
        "networks": [] if episode is None else _networks(reader, episode),
    }


def _networks(reader: RunReader, episode: Episode) -> list[dict[str, Any]]:
    steps = _by_network(episode.payloads(reader, "step_taken"))
    started = _by_network(episode.payloads(reader, "episode_started"))
    ended = _by_network(episode.payloads(reader, "episode_ended"))
    rollbacks = _by_network(episode.payloads(reader, "rolled_back"))
    return [
        {
            "environment": number,
            **{field: _last(started[number]).get(field) for field in _STARTED_FIELDS},
            "steps": [{field: step.get(field) for field in STEP_FIELDS} for step in steps[number]],
            "objective": _last(ended[number]).get("objective"),
            "rollbacks": len(rollbacks[number]),
        }
        for number in sorted({*started, *steps})
    ]


def _by_network(payloads: list[dict[str, Any]]) -> defaultdict[int, list[dict[str, Any]]]:
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for payload in payloads:
        if isinstance(number := payload.get("environment"), int):
            found[number].append(payload)
    return found


def _last(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    return payloads[-1] if payloads else {}
