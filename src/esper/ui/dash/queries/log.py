"""The log of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.values import payload_of, plain

PAGE = 100
"""Events of one answer."""


def log(reader: RunReader, types: Sequence[str], text: str, before: int | None) -> dict[str, Any]:
    """The newest events, of these ``types`` if any are given, that contain ``text``, with ids below ``before``."""
    conditions, parameters = ["1"], list[int | str]()
    if types:
        # `+`: to walk back along the ids finds a page sooner than to gather all events of the types.
        conditions.append(f"+type IN ({', '.join('?' for _ in types)})")
        parameters += types
    if text:
        conditions.append("instr(lower(type || ' ' || payload), lower(?))")
        parameters.append(text)
    if before is not None:
        conditions.append("id < ?")
        parameters.append(before)
    cursor = reader.last_id()
    where = " AND ".join(conditions)
    rows = reader.rows(
        f"SELECT id, time, type, iteration, payload FROM events WHERE {where} ORDER BY id DESC LIMIT {PAGE + 1}",
        *parameters,
    )
    counts = reader.rows("SELECT type, count(*) FROM events GROUP BY type ORDER BY type")
    return {
        "cursor": cursor,
        "types": [{"type": name, "count": count} for name, count in counts],
        "events": [as_entry(row) for row in rows[:PAGE]],
        "more": len(rows) > PAGE,
    }


def as_entry(row: Sequence[Any]) -> dict[str, Any]:
    """An event from its columns id, time, type, iteration, payload."""
    number, time, name, iteration, payload = row
    return {
        "id": number,
        "time": plain(time),
        "type": name,
        "iteration": iteration,
        "payload": payload_of(payload),
    }
