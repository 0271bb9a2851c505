"""How far a bridge has come: a small file beside the run, so that the next process goes on from there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import RunError
from esper.files import write_atomically


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run's figures go."""

    destination: str
    """A folder, project or URI, as the tool understands it."""
    run: str
    """The tool's own name of the run there."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What has been carried over."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    address: Address | None = None
    """None before anything was."""
    iteration: int = -1
    """The last one that was handed over."""
    moments: int = 0
    """How much of the run's history was looked through for rewinds."""
    told: int = 0
    """How much of it was handed over."""


_ADAPTER = TypeAdapter(Cursor)


def load_cursor(path: Path) -> Cursor:
    """The cursor at `path`, or that of a new bridge if there is none; RunError if it cannot be read."""
    if not path.exists():
        return Cursor()
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunError(f"{path} does not say how far the bridge has come: remove it to begin anew elsewhere") from error


def save_cursor(path: Path, cursor: Cursor) -> None:
    """Keep the cursor, durably; RunError if it cannot be written."""
    write_atomically(path, _ADAPTER.dump_json(cursor))
