"""Reading a run's metadata, events and scalars, and the metric that its growth is measured by."""

import json
import math
import reprlib
import sqlite3
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from esper.config.settings import describe_first_error
from esper.errors import RunError
from esper.runs.database import limit_reading, open_for_reading, translate_errors
from esper.runs.events import Event, decode_event

E = TypeVar("E", bound=Event)
CHUNK = 5000
"""Number of events read at a time."""
LARGEST_ANSWER = 2**31
"""Largest size of all rows of a query, in bytes as Python objects."""
_ROWS = 1000
"""Number of rows between checks of their size."""
_EVENT_COLUMNS = "id, time, type, version, iteration, payload"
LARGEST_COUNT = 2**53
"""The largest integer that floats and browsers represent exactly."""
_YEAR_10000 = 253_402_300_800.0
"""Seconds since 1970; Python's dates end here."""


_NUMBER = frozenset({int, float})
_COLUMNS: Mapping[str, tuple[frozenset[type], float | None]] = {
    **dict.fromkeys(("id", "version", "iteration"), (frozenset({int}), LARGEST_COUNT)),
    "time": (_NUMBER, _YEAR_10000),
    **dict.fromkeys(("key", "text", "type", "payload", "name"), (frozenset({str}), None)),
    "value": (_NUMBER | {type(None)}, None),
}
"""The types of each column of the tables, and the largest value of those that go up from 0."""


class _Metadata(BaseModel):
    """The metadata that `esper train` and `Grower` write; a store may have more."""

    model_config = ConfigDict(extra="allow", strict=True)

    command: str = ""
    seed: int = 0
    suite: str = ""
    host: str = ""
    controller: str = ""
    environments: int = 0
    iterations: int = 0
    steps: int = 0
    slots: list[str] = []
    blueprints: list[str] = []
    operations: list[str] = []
    heads: list[str] = []
    features: dict[str, list[str]] = {}
    baseline_levels: dict[str, float] = {}


class EventRecord(NamedTuple):
    """An event as stored; this version of Esper may not know its type or version."""

    id: int
    time: float
    """Seconds since 1970."""
    type: str
    version: int
    iteration: int
    payload: str


class QueryResult(NamedTuple):
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class RunReader:
    """Reads a run store, even while another process writes to it.

    Every query or `snapshot` is one short transaction, as a long one keeps the writer from truncating its log.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a store; RunError if it is missing, damaged or not a run store."""
        return cls(path, open_for_reading(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def metadata(self) -> dict[str, Any]:
        """All metadata of the run."""
        rows = self.rows("SELECT key, value AS text FROM metadata")
        try:
            metadata = {key: json.loads(text) for key, text in rows}
            _Metadata.model_validate(metadata)
        except ValidationError as error:
            reason = describe_first_error(error, _Metadata).sentence
            raise RunError(f"the metadata of the run store {self.path} are damaged ({reason})") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"the metadata of the run store {self.path} are damaged ({error})") from error
        return metadata

    def events(self, event_type: type[E]) -> list[E]:
        """Events of one type in the order in which they were emitted."""
        records = self._records("WHERE type = ? ORDER BY id", event_type.name)
        return [cast("E", self.decode(record)) for record in records]

    def records(self, after_id: int = 0, limit: int = CHUNK) -> list[EventRecord]:
        """The first `limit` events with ids above `after_id`, in order."""
        return self._records("WHERE id > ? ORDER BY id LIMIT ?", after_id, limit)

    def decode(self, record: EventRecord) -> Event:
        """Decode a record; RunError if it is damaged or unknown."""
        try:
            return decode_event(record.type, record.version, record.payload)
        except RunError as error:
            raise RunError(f"the run store {self.path}: {error}") from error

    def records_within(
        self, first: int, last: int, event_types: Sequence[str], environment: int | None = None
    ) -> list[EventRecord]:
        """Events of these types in iterations `first` to `last`, in order, of all networks or of one `environment`."""
        condition = f"WHERE type IN ({', '.join('?' for _ in event_types)}) AND iteration BETWEEN ? AND ?"
        if environment is None:
            return self._records(f"{condition} ORDER BY id", *event_types, first, last)
        only = "json_valid(payload) AND json_extract(payload, '$.environment') = ?"
        return self._records(f"{condition} AND {only} ORDER BY id", *event_types, first, last, environment)

    def records_between(self, after: int, last: int, event_types: Sequence[str]) -> list[EventRecord]:
        """Events of these types with ids above `after` and up to `last`, in order."""
        # `+` makes SQLite scan by id, which is faster than collecting all events of the types.
        marks = ", ".join("?" for _ in event_types)
        return self._records(f"WHERE id > ? AND id <= ? AND +type IN ({marks}) ORDER BY id", after, last, *event_types)

    def newest(self, event_type: str, limit: int = 1) -> list[EventRecord]:
        """The newest events of a type, newest iteration first."""
        return self._records("WHERE type = ? ORDER BY iteration DESC, id DESC LIMIT ?", event_type, limit)

    def last_emitted(self, event_types: Sequence[str]) -> EventRecord | None:
        """The event of these types that was emitted last, in any iteration; None if there is none."""
        # `+` makes SQLite use the index of types, because events of such types are few.
        marks = ", ".join("?" for _ in event_types)
        records = self._records(f"WHERE type IN ({marks}) ORDER BY +id DESC LIMIT 1", *event_types)
        return records[0] if records else None

    def last_id(self) -> int:
        """Id of the newest event; 0 if there are none."""
        ((last,),) = self.rows("SELECT coalesce(max(id), 0) AS id FROM events")
        return last

    def holds(self, record: EventRecord) -> bool:
        """Whether an event still exists: a resumed run deletes what it repeats."""
        return self.rows("SELECT time FROM events WHERE id = ?", record.id) == [(record.time,)]

    def query(self, sql: str, *parameters: int | str) -> QueryResult:
        """Run one SELECT on the tables and views, within limits of time and size."""
        rows, size = list[tuple[Any, ...]](), 0
        with translate_errors(self.path), limit_reading(self._connection, self.path):
            cursor = self._connection.execute(sql, parameters)
            while chunk := cursor.fetchmany(_ROWS):
                size += sum(map(sys.getsizeof, chain.from_iterable(chunk)))
                if size > LARGEST_ANSWER:
                    raise RunError(
                        f"a query of the run store {self.path} gave more than {LARGEST_ANSWER >> 30} GiB, and was "
                        "stopped: select less of it, for instance with LIMIT"
                    )
                rows += chunk
        # If the SQL has no statement, only a comment for instance, there is no description.
        return QueryResult(tuple(name for name, *_ in cursor.description or ()), rows)

    def rows(self, sql: str, *parameters: int | str) -> list[Any]:
        """The rows of a query, in which columns named as those of tables are checked."""
        # SQLite stores values of any type in any column, so a damaged or foreign store may contain anything.
        result = self.query(sql, *parameters)
        for name, values in zip(result.columns, zip(*result.rows, strict=True), strict=bool(result.rows)):
            types, largest = _COLUMNS.get(name, (None, None))
            invalid = [value for value in values if types and type(value) not in types]
            if not invalid and largest is not None:
                invalid = [value for value in (min(values), max(values)) if not 0 <= value <= largest]
            if invalid:
                shown = reprlib.repr(invalid[0])
                raise RunError(f"the run store {self.path} is damaged: its column `{name}` holds {shown}")
        return result.rows

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """All reads inside see the same state of the store, even if the run is rewound meanwhile."""
        with translate_errors(self.path):
            # In WAL mode a transaction keeps reading the state at its first query.
            self._connection.execute("BEGIN")
            with self._connection:
                yield

    def scalar_names(self) -> list[str]:
        """Names of all scalars, sorted."""
        return [name for (name,) in self.rows("SELECT DISTINCT name FROM scalars ORDER BY name")]

    def series(self, name: str, after: int = -1) -> list[tuple[int, float]]:
        """Pairs (iteration, value) of one scalar for iterations above `after`."""
        rows = self.rows(
            "SELECT iteration, value FROM scalars WHERE name = ? AND iteration > ? ORDER BY iteration", name, after
        )
        return [(iteration, _number(value)) for iteration, value in rows]

    def scalars_at(self, iteration: int) -> dict[str, float]:
        """All scalars of one iteration."""
        rows = self.rows("SELECT name, value FROM scalars WHERE iteration = ?", iteration)
        return {name: _number(value) for name, value in rows}

    def last_iteration(self) -> int:
        """The highest iteration that has scalars; 0 if there are none."""
        ((last,),) = self.rows("SELECT coalesce(max(iteration), 0) AS iteration FROM scalars")
        return last

    def _records(self, condition: str, *parameters: int | str) -> list[EventRecord]:
        return [EventRecord(*row) for row in self.rows(f"SELECT {_EVENT_COLUMNS} FROM events {condition}", *parameters)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# The metric. All views of a run read it here.

LOSS, ACCURACY = "loss", "accuracy"
"""These names need no explanation."""
SCORE = "score"
"""Name of the scalar for the score, where that differs from the metric."""
SCORE_MEANING = (
    "Score is test accuracy (in loss-based suites, the relative loss reduction) minus rent, the price of added "
    "parameters."
)
J_MEANING = "J is the same on validation data; controllers maximize it."
"""Definitions for pages, at the first use of these words; `J_MEANING` follows `SCORE_MEANING`."""
METRIC_NAME = f"COALESCE((SELECT json_extract(value, '$') FROM metadata WHERE key = 'metric'), '{ACCURACY}')"
"""SQL for the name of a run's metric."""


@dataclass(frozen=True)
class RunMetric:
    """A metric on validation data, under the user's name for it; in populations usually accuracy."""

    metric: str = ACCURACY
    """Name of the metric."""
    higher_is_better: bool = True
    reference: float | None = None
    """Where lower is better: the value at which the score is 0; the score is the relative reduction below it."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The metric that a run's metadata name; accuracy if they name none or an invalid one."""
        name, rises, reference = (metadata.get(key) for key in ("metric", "higher_is_better", "reference"))
        if not isinstance(name, str) or not isinstance(rises, bool):
            return cls()
        return cls(name, rises, float(reference) if isinstance(reference, int | float) else None)

    @property
    def scalar(self) -> str:
        """Name of the scalar that holds the metric's values, in its own units."""
        return f"validation_{self.metric}"

    @property
    def train_scalar(self) -> str:
        """Name of the scalar that holds the metric's values in training, if they are recorded."""
        return f"train_{self.metric}"

    @property
    def is_loss(self) -> bool:
        """Whether the metric is the validation loss; then there is no other metric."""
        return self.metric == LOSS

    @property
    def direction(self) -> str:
        """Whether higher or lower is better, for metrics whose names need an explanation."""
        if self.metric in (LOSS, ACCURACY):
            return ""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


LOSS_REDUCTION = RunMetric("loss_gone")
"""The metric of populations on a suite whose objective is the loss: its relative reduction below that of guessing."""


def describe_contributions(metadata: Mapping[str, Any]) -> str:
    """A sentence that defines a run's contributions and their units."""
    metric = RunMetric.from_metadata(metadata)
    text = "Contribution: how much the model depends on a slot's seed, "
    if metric.higher_is_better:
        text += f"{metric.metric} on validation data with it less that without it."
    else:
        text += f"{metric.metric} on validation data without it less that with it, as a share of that without it."
    if metadata.get("refit"):
        text += " Of seeds on probation, without it is a copy of the model that trains on without the seed."
    return text
