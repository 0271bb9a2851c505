"""The numbers behind a figure or a table, as a query gave them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.telemetry.reader import RunReader

Value = str | int | float | None
Row = Mapping[str, Value]
"""Values by the names of their columns."""


@dataclass(frozen=True)
class Rows:
    """Rows of values under named columns."""

    columns: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> list[Value]:
        """A column's values.

        Raises:
            ValueError: there is no such column.
        """
        place = self.columns.index(name)
        return [row[place] for row in self.values]

    def numbers(self, name: str) -> list[float]:
        """A column of numbers; NaN for what is missing or not finite."""
        return [
            value if isinstance(value, int | float) and math.isfinite(value) else math.nan
            for value in self.column(name)
        ]

    def texts(self, name: str) -> list[str]:
        """A column of texts."""
        return [str(value) for value in self.column(name)]

    def mappings(self) -> list[Row]:
        """The rows with the names of their columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.values]

    def by(self, name: str) -> dict[str, Rows]:
        """The rows of each value of a column, in the order in which these values first come."""
        parts: dict[str, list[tuple[Value, ...]]] = {}
        for key, row in zip(self.texts(name), self.values, strict=True):
            parts.setdefault(key, []).append(row)
        return {key: Rows(self.columns, tuple(part)) for key, part in parts.items()}

    def csv(self) -> str:
        """As CSV with a header; numbers in full, nothing for what is missing."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.values)
        return text.getvalue()


def fetch(store: Path, queries: Sequence[str]) -> list[Rows]:
    """What each query gives on the run store at that path, each in a short transaction of its own.

    Raises:
        RunError: the store is missing, damaged or not ours.
    """
    with RunReader.open(store) as reader:
        answers = [reader.ask(query) for query in queries]
    return [Rows(answer.columns, tuple(answer.rows)) for answer in answers]
