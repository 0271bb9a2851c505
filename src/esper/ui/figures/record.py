"""What a figure or a table is: what it shows, where its numbers come from, and how they become visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from esper.ui.figures.rows import Rows, Value, fetch

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Query:
    """SQL that gives the numbers, on the store of the run."""

    suffix: ClassVar[str] = ".sql"

    text: str


@dataclass(frozen=True)
class Files:
    """In words: which fields of which files give the numbers."""

    suffix: ClassVar[str] = ".txt"

    text: str


Source = Query | Files


@dataclass(frozen=True)
class Figure:
    """A drawing one column wide."""

    name: str
    """Of its files."""
    caption: str
    source: Source
    draw: Callable[[Canvas, Rows], None]
    absent: str
    """Why there may be nothing to draw."""
    height: float = 2.3
    """In inches."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its name in the rows, its heading, and how its values are written."""

    name: str
    heading: str
    written: Callable[[Value], str]
    numeric: bool = True
    long: bool = False
    """Whether a value may take several lines."""


@dataclass(frozen=True)
class Table:
    """Figures in rows."""

    name: str
    """Of its files."""
    caption: str
    source: Source
    columns: tuple[Column, ...]
    absent: str
    """Why there may be no rows."""


Exhibit = tuple[Figure | Table, Rows]
"""With its numbers; without rows it cannot be shown."""


def measured(store: Path, queried: Sequence[Figure | Table]) -> list[Exhibit]:
    """Figures and tables whose sources are queries, with what these give on the run store at that path."""
    return list(zip(queried, fetch(store, [what.source.text for what in queried]), strict=True))
