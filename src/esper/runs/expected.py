"""What the columns and the metadata of a run store hold, checked when they are read; SQLite itself keeps anything."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from esper.config.settings import describe_first_error

LARGEST_COUNT = 2**53
"""Whole numbers above it are not whole as floats, nor in a browser."""
_YEAR_10000 = 253_402_300_800.0
"""Seconds since 1970, after which dates have no name."""


@dataclass(frozen=True, slots=True)
class _Column:
    types: frozenset[type]
    low: float | None = None
    high: float | None = None

    def trouble(self, values: Sequence[Any]) -> str | None:
        """A value that does not belong there."""
        if not self.types.issuperset(map(type, values)):
            return next(reprlib.repr(value) for value in values if type(value) not in self.types)
        if self.low is None or self.high is None:
            return None
        return next((repr(value) for value in (min(values), max(values)) if not self.low <= value <= self.high), None)


_TEXT = _Column(frozenset({str}))
_COUNT = _Column(frozenset({int}), 0, LARGEST_COUNT)
_COLUMNS: Mapping[str, _Column] = {
    **dict.fromkeys(("id", "version", "iteration"), _COUNT),
    "time": _Column(frozenset({int, float}), 0.0, _YEAR_10000),
    **dict.fromkeys(("key", "text", "type", "payload", "name"), _TEXT),
    "value": _Column(frozenset({int, float, type(None)})),
}
"""What the tables' columns hold, by name."""


class _Metadata(BaseModel):
    """Types of what `esper train` and `Grower` say of a run; others may say more."""

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


def trouble_in(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str | None:
    """What is wrong with rows of columns of these names; None if nothing is. Other columns may hold anything."""
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if (column := _COLUMNS.get(name)) and (value := column.trouble(values)):
            return f"its column `{name}` holds {value}"
    return None


def check_expected(metadata: dict[str, Any]) -> dict[str, Any]:
    """The same metadata; ValueError if one of them is not of its type."""
    try:
        _Metadata.model_validate(metadata)
    except ValidationError as error:
        raise ValueError(describe_first_error(error, _Metadata).sentence) from error
    return metadata
