"""Reading a run's metadata, events and scalars."""

import json
import math
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from esper.telemetry.database import open_for_reading, translated_errors
from esper.telemetry.events import Event, decode

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its place in the store and the time (seconds since 1970) at which it was emitted."""

    id: int
    time: float
    event: Event


class RunReader:
    """A read-only view of a run store, usable while another process writes to it.

    Every query is one short transaction: a long one would keep the writer from trimming its log.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the store at `path`; RunError if it is missing, damaged or not ours."""
        return cls(path, open_for_reading(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def metadata(self) -> dict[str, Any]:
        """All metadata of the run."""
        return {key: json.loads(value) for key, value in self._query("SELECT key, value FROM metadata")}

    def stored_events(self, after_id: int = 0) -> list[StoredEvent]:
        """Events in the order in which they were emitted; `after_id` lets a follower ask for the new ones only."""
        rows = self._query(
            "SELECT id, time, type, version, payload FROM events WHERE id > ? ORDER BY id",
            after_id,
        )
        return [StoredEvent(row, time, decode(name, version, payload)) for row, time, name, version, payload in rows]

    def events(self, event_type: type[E]) -> list[E]:
        """Events of one type in the order in which they were emitted."""
        rows = self._query("SELECT version, payload FROM events WHERE type = ? ORDER BY id", event_type.name)
        return [cast("E", decode(event_type.name, version, payload)) for version, payload in rows]

    def scalar_names(self) -> list[str]:
        """Names of all scalars, sorted."""
        return [name for (name,) in self._query("SELECT DISTINCT name FROM scalars ORDER BY name")]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(iteration, value) of one scalar, by iteration."""
        rows = self._query("SELECT iteration, value FROM scalars WHERE name = ? ORDER BY iteration", name)
        return [(iteration, _number(value)) for iteration, value in rows]

    def scalars_at(self, iteration: int) -> dict[str, float]:
        """All scalars of one iteration."""
        rows = self._query("SELECT name, value FROM scalars WHERE iteration = ?", iteration)
        return {name: _number(value) for name, value in rows}

    def last_iteration(self) -> int:
        """The highest iteration that has scalars; 0 if there are none."""
        ((last,),) = self._query("SELECT max(iteration) FROM scalars")
        return last or 0

    def _query(self, sql: str, *parameters: int | str) -> list[Any]:
        with translated_errors(self.path):
            return self._connection.execute(sql, parameters).fetchall()


def _number(value: float | None) -> float:
    return math.nan if value is None else value
