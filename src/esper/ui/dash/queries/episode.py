"""The events of one episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from esper.errors import RunError
from esper.telemetry.reader import RunReader
from esper.ui.dash.queries.values import payload_of

_MARKS = "type IN ('episode_started', 'step_taken')"
_EVER = 2**62


@dataclass(frozen=True)
class Episode:
    """An episode of a run, and which ones there are."""

    number: int
    first: int
    last: int
    alone: bool
    """Whether the run is that of a model that grows alone: its one episode spans all iterations."""

    @classmethod
    def of(cls, reader: RunReader, command: str, number: int | None) -> Self | None:
        """The episode of that number, or the newest; None where the run has none yet.

        Raises:
            RunError: there is no episode of that number.
        """
        found = reader.rows(
            # Without a group there would be a row of NULLs where there are no events.
            f"SELECT min(iteration) AS iteration, max(iteration) AS iteration FROM events WHERE {_MARKS} GROUP BY NULL"
        )
        if not found:
            return None
        ((first, last),) = found
        if command == "grow":
            first = last = 1
        if number is not None and not first <= number <= last:
            raise RunError(f"there is no episode {number} in this run: choose one from {first} to {last}")
        return cls(last if number is None else number, first, last, command == "grow")

    def place(self) -> dict[str, int]:
        """Its number, among those that there are."""
        return {"number": self.number, "first": self.first, "last": self.last}

    def payloads(self, reader: RunReader, event: str, environment: int | None = None) -> list[dict[str, Any]]:
        """What the episode's events of a type say, in order; of one network if one is given."""
        low, high = (0, _EVER) if self.alone else (self.number, self.number)
        sql = "SELECT payload FROM events WHERE type = ? AND iteration BETWEEN ? AND ?"
        if environment is None:
            rows = reader.rows(f"{sql} ORDER BY id", event, low, high)
        else:
            only = "json_valid(payload) AND json_extract(payload, '$.environment') = ?"
            rows = reader.rows(f"{sql} AND {only} ORDER BY id", event, low, high, environment)
        return [payload_of(text) for (text,) in rows]
