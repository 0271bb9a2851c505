"""What a figure or a table is: what it shows, where its numbers come from, and how they become visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from esper.ui.figures.rows import Row, Rows, Value, fetch

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Query:
    """SQL that gives the numbers, on the store of the run."""

    suffix: ClassVar[str] = ".sql"
    title: ClassVar[str] = "The query behind it, for esper query"

    text: str


@dataclass(frozen=True)
class Files:
    """In words: which fields of which files give the numbers."""

    suffix: ClassVar[str] = ".txt"
    title: ClassVar[str] = "Where its numbers come from"

    text: str


Source = Query | Files


@dataclass(frozen=True)
class Figure:
    """A drawing."""

    folder: ClassVar[str] = "figures"

    name: str
    """Of its files."""
    caption: str
    source: Source
    draw: Callable[[Canvas, Rows], None]
    absent: str
    """Why there may be nothing to draw."""
    height: float = 2.3
    """In inches."""
    columns: int = 1
    """Of a paper in two columns, how many it is wide."""


@dataclass(frozen=True)
class Cell:
    """A value of a table as it is read."""

    text: str
    note: str = ""
    """In small print beside it."""
    mark: str = ""
    """What stresses it on the page: policy, above, below, other or best."""
    heat: float = 0.0
    """How strongly it is coloured there, 0 to 1."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its name in the rows, its heading, and how its values are written."""

    name: str
    heading: str
    written: Callable[[Value], str]
    numeric: bool = True
    long: bool = False
    """Whether a value may take several lines."""
    note: Callable[[Row], str] | None = None
    mark: Callable[[Row], str] | None = None
    heat: Callable[[Row], float] | None = None

    def cell(self, row: Row) -> Cell:
        """What it shows of a row."""
        return Cell(
            self.written(row[self.name]),
            "" if self.note is None else self.note(row),
            "" if self.mark is None else self.mark(row),
            0.0 if self.heat is None else self.heat(row),
        )


@dataclass(frozen=True)
class Table:
    """Figures in rows."""

    folder: ClassVar[str] = "tables"

    name: str
    """Of its files."""
    caption: str
    source: Source
    columns: tuple[Column, ...]
    absent: str
    """Why there may be no rows."""
    upright: bool = False
    """Whether headings stand upright on the page, where they take no more room than their figures."""

    def cells(self, rows: Rows) -> list[list[Cell]]:
        """What is read in each row."""
        return [[column.cell(row) for column in self.columns] for row in rows.mappings()]


Exhibit = tuple[Figure | Table, Rows]
"""With its numbers; without rows it cannot be shown."""


def measured(store: Path, queried: Sequence[Figure | Table]) -> list[Exhibit]:
    """Figures and tables whose sources are queries, with what these give on the run store at that path."""
    return list(zip(queried, fetch(store, [what.source.text for what in queried]), strict=True))
