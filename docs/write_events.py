"""The documentation of all events and views, as Markdown made from the code.

``python docs/write_events.py > docs/reference/events.md`` writes it anew.
"""

import ast
import inspect
import sqlite3
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest

from esper.runs.events import Event, NetworkEvent, event_types
from esper.runs.views import VIEWS, build_view_statements

_BAR = "\\|"
"""A bar in a cell of a table."""

_INTRODUCTION = """\
# Events and views of a run

What happens in a run is kept in its `run.db`, an SQLite file, as typed, versioned events. Any tool that reads SQLite
selects from them, best through the views: [see it grow](../ui.md#in-sql-and-pandas) has lines for `sqlite3` and pandas.

This page is made from the code by `python docs/write_events.py > docs/reference/events.md`.
"""

_EVENTS = """\
## Events

The table `events` has a row per event: its `id`, by which the events of each network are in order; the `time` at which
it was made, in seconds since 1970; its `type` and `version`; the `iteration` it belongs to; and its `payload`, the
fields below as JSON. A field that has its default is left out of the payload. Numbers that are not finite are the
strings `NaN`, `Infinity` and `-Infinity`. In training, the events of a shard of a rollout come when the shard has
ended. A resumed run forgets the events after its checkpoint and makes them anew.

Every event has the field `iteration`, of type `int`. Events marked *of a network* also have `episode`, `environment`
and `step`, all `int`: in training, an episode has the number of its iteration; a model that grows alone has the single
episode 1; `step` counts the episode's decisions from 0. Slots are given by their index, whose name is in the run's
metadata `slots`; stages, operations, causes, reasons and blueprints are given by name.
"""

_VIEWS = """\
## Views

Columns bear the names of the events' fields. `episode` and `environment` identify the network, `step` counts its
decisions from 0; columns named after a stage hold the step at which a seed reached it.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, _EVENTS, event_table(), _VIEWS, view_table()])


def event_table() -> str:
    """Every event: its name, version and meaning, and a table of its fields."""
    return "\n".join(_section(name, event_type) for name, event_type in sorted(event_types().items()))


def view_table() -> str:
    """Every view: what a row is, and its columns."""
    columns = view_columns()
    return _table(
        ("view", "a row is", "columns"),
        (
            (f"`{name}`", view.meaning, ", ".join(f"`{column}`" for column in columns[name]))
            for name, view in VIEWS.items()
        ),
    )


def view_columns() -> dict[str, tuple[str, ...]]:
    """Names of the columns of every view, by view; they are the same in every run."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE events (id, time, type, version, iteration, payload)")
        connection.executescript(build_view_statements("VIEW"))
        return {
            name: tuple(column for column, *_ in connection.execute(f"SELECT * FROM {name} LIMIT 0").description)
            for name in VIEWS
        }


def _section(name: str, event_type: type[Event]) -> str:
    network = ", of a network" if issubclass(event_type, NetworkEvent) else ""
    heading = f"### `{name}`, version {event_type.version}{network}\n"
    rows = [(f"`{one.name}`", f"`{one.type}`", one.default, one.meaning) for one in _fields(event_type)]
    table = _table(("field", "type", "default", "meaning"), rows) if rows else ""
    return "\n".join([heading, f"{inspect.getdoc(event_type)}\n", table])


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that an event type has of its own, as its source code says it."""

    name: str
    type: str
    default: str
    meaning: str


def _fields(event_type: type[Event]) -> Iterator[_Field]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(event_type))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, after in zip_longest(definition.body, definition.body[1:]):
        if isinstance(statement, ast.AnnAssign):
            name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
            yield _Field(name, kind, _default(statement.value), _docstring(after))


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    # What a default factory makes is empty.
    return "`{}`" if isinstance(value, ast.Call) else f"`{ast.unparse(value)}`"


def _docstring(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(ast.Constant(str(text))):
            return " ".join(text.split())
        case _:
            return ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Without the columns that are empty throughout."""
    columns = [(head, cells) for head, cells in zip(heads, zip(*rows, strict=True), strict=True) if any(cells)]
    lines = zip(*((head, "---", *cells) for head, cells in columns), strict=True)
    return "".join(f"| {' | '.join(cell.replace('|', _BAR) for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(document())
