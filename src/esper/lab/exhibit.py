"""Figures and tables: their numbers, where these come from, and how they are drawn or written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from esper.dash.formats import EN_DASH
from esper.runs.reader import RunReader

FULL_HEAT = 0.6
"""Opacity of the strongest cell, so that its figure stays readable."""

Value = str | int | float | None
Row = Mapping[str, Value]
"""Values by the names of their columns."""


def read_numbers(rows: Sequence[Row], name: str) -> list[float]:
    """A column of numbers; NaN for what is missing or not finite."""
    values = [row[name] for row in rows]
    return [value if isinstance(value, int | float) and math.isfinite(value) else math.nan for value in values]


def group_rows(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
    """The rows of each value of a column, in order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[name]), []).append(row)
    return groups


@dataclass(frozen=True)
class Files:
    """A source in words: which fields of which files give the numbers."""

    suffix: ClassVar[str] = ".txt"
    title: ClassVar[str] = "Where its numbers come from"

    text: str


class Query(Files):
    """A source in SQL: the query that gives the numbers on the store of the run."""

    suffix: ClassVar[str] = ".sql"
    title: ClassVar[str] = "The query behind it, for sqlite3"


@dataclass(frozen=True)
class Drawing:
    """A figure of a report; ``absent`` says why there may be nothing to draw."""

    folder: ClassVar[str] = "figures"

    name: str
    caption: str
    source: Files
    draw: Callable[[Any, Sequence[Row]], None]
    """Draws the rows on a figure of matplotlib."""
    absent: str
    height: float = 2.3
    columns: int = 1
    """Of a paper in two columns."""
    rows: Sequence[Row] = ()


class Cell(NamedTuple):
    """A value of a table as it is read; ``bounds`` are the ends of its interval."""

    text: str
    note: str
    """Small print beside the figure."""
    bounds: tuple[str, ...]
    """The ends of its interval, also in the note."""
    mark: str
    """Emphasis: policy, above, below, other or best."""
    heat: float
    """Opacity of its colour on the page."""


@dataclass(frozen=True)
class Column:
    """A column of a table: how the rows' values of that name are written."""

    name: str
    write_number: Callable[[float], str] | None = None
    """Formats a number; None for a column of texts."""
    title: str | None = None
    """The heading; None: the name."""
    bounded: bool = False
    """Whether rows have the interval, too, under the name with _low and _high."""
    missing: str = EN_DASH
    long: bool = False
    """Whether a value may take several lines."""
    optional: bool = False
    """Whether it is left out where no row has a value."""
    note: Callable[[Row], str] | None = None
    mark: Callable[[Row], str] | None = None
    heated: float | None = None
    """The value that is coloured most strongly."""

    @property
    def heading(self) -> str:
        return self.name.replace("_", " ") if self.title is None else self.title

    def cell(self, row: Row) -> Cell:
        def write(value: Value) -> str:
            if value is None:
                return self.missing
            return str(value) if isinstance(value, str) or self.write_number is None else self.write_number(value)

        ends = [row[f"{self.name}{end}"] for end in ("_low", "_high")] if self.bounded else []
        bounds = tuple(write(end) for end in ends if end is not None)
        note = f"[{' to '.join(bounds)}]" if bounds else self.note(row) if self.note else ""
        value = row[self.name]
        heat = FULL_HEAT * value / self.heated if self.heated and isinstance(value, int | float) else 0.0
        return Cell(write(value), note, bounds, self.mark(row) if self.mark else "", heat)


@dataclass(frozen=True)
class Table:
    folder: ClassVar[str] = "tables"

    name: str
    """The stem of its files' names."""
    caption: str
    source: Files
    columns: tuple[Column, ...]
    absent: str
    """Why there may be no rows."""
    upright: bool = False
    """Whether headings stand upright on the page."""
    rows: Sequence[Row] = ()

    @property
    def shown_columns(self) -> list[Column]:
        """The columns without optional ones that have no value."""
        filled = {name for row in self.rows for name, value in row.items() if value is not None}
        return [column for column in self.columns if not column.optional or column.name in filled]


Exhibit = Drawing | Table


def run_queries(store: Path, exhibits: Sequence[Exhibit]) -> list[Exhibit]:
    """Figures and tables with the rows that their queries give on a run store."""
    with RunReader.open(store) as reader:
        results = [reader.query(exhibit.source.text) for exhibit in exhibits]
    return [
        replace(exhibit, rows=[dict(zip(result.columns, row, strict=True)) for row in result.rows])
        for exhibit, result in zip(exhibits, results, strict=True)
    ]
