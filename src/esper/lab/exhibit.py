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
    suffix: ClassVar[str] = ".txt"
    title: ClassVar[str] = "Where its numbers come from"

    text: str


class Query(Files):
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
    bounds: tuple[str, ...]
    mark: str
    """Emphasis: policy, above, below, other or best."""
    heat: float


@dataclass(frozen=True)
class Column:
    name: str
    write_number: Callable[[float], str] | None = None
    """None for a column of texts."""
    title: str | None = None
    bounded: bool = False
    """Whether rows have the interval, too, under the name with _low and _high."""
    missing: str = EN_DASH
    long: bool = False
    optional: bool = False
    """Whether it is left out where no row has a value."""
    note: Callable[[Row], str] | None = None
    mark: Callable[[Row], str] | None = None
    heated: float | None = None

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
    caption: str
    source: Files
    columns: tuple[Column, ...]
    absent: str
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
    with RunReader.open(store) as reader:
        results = [reader.query(exhibit.source.text) for exhibit in exhibits]
    return [
        replace(exhibit, rows=[dict(zip(result.columns, row, strict=True)) for row in result.rows])
        for exhibit, result in zip(exhibits, results, strict=True)
    ]
