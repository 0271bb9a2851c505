"""One network of an episode."""

from __future__ import annotations

from typing import Any

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve
from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.episode import Episode
from esper.ui.dash.queries.lives import lives
from esper.ui.dash.queries.values import plain

_DESCRIBED = ("slots", "blueprints", "operations", "features", "environments", "steps")


def network(reader: RunReader, number: int | None, environment: int) -> dict[str, Any]:
    """All that is known of a network in an episode, the newest where none is given."""
    cursor, metadata = reader.last_id(), reader.metadata()
    episode = Episode.of(reader, metadata.get("command", ""), number)
    found: dict[str, Any] = {
        "cursor": cursor,
        "environment": environment,
        **{key: plain(metadata.get(key)) for key in _DESCRIBED},
        "episode": None,
    }
    if episode is None:
        return found

    def told(event: str) -> list[dict[str, Any]]:
        return episode.payloads(reader, event, environment)

    transitions = told("lifecycle_transition")
    return {
        **found,
        "episode": episode.place(),
        "started": next(iter(told("episode_started")), None),
        "ended": next(iter(told("episode_ended")), None),
        "decisions": told("step_taken"),
        "seeds": lives(transitions),
        "gates": told("gate_judged"),
        "rollbacks": told("rolled_back"),
        "looks": [look.get("step") for look in told("policy_looked")],
    }


def look(reader: RunReader, number: int, environment: int, step: int) -> dict[str, Any]:
    """What the policy saw and thought of a network before a decision; `look` is None where that was not kept."""
    metadata = reader.metadata()
    episode = Episode.of(reader, metadata.get("command", ""), number)
    looks = [] if episode is None else episode.payloads(reader, "policy_looked", environment)
    return {
        "look": next((one for one in looks if one.get("step") == step), None),
        "features": plain(metadata.get("features")),
        "choices": {
            "op": plain(metadata.get("operations")),
            "slot": plain(metadata.get("slots")),
            "blueprint": plain(metadata.get("blueprints")),
            "blend": [blend.name.lower() for blend in Blend],
            "tempo": [f"{tempo} steps" for tempo in TEMPOS],
            "alpha_target": [str(target) for target in ALPHA_TARGETS],
            "alpha_speed": [f"{speed} steps" for speed in ALPHA_SPEEDS],
            "alpha_curve": [curve.name.lower() for curve in Curve],
        },
    }
