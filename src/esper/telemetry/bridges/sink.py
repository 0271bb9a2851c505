"""What a bridge asks of the tool at its other end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from esper.telemetry.bridges.cursor import Address
from esper.telemetry.bridges.tail import Figures

Value = str | int | float | bool


@dataclass(frozen=True)
class Opening:
    """What a sink begins or goes on with."""

    name: str
    """Of the run, for people."""
    folder: Path
    """Where it may keep files; it exists."""
    destination: str | None
    """What the user asked for; None for the tool's default."""
    address: Address | None
    """Where the run is already, if an earlier process has begun."""
    after: int
    """The last iteration that is known to have arrived; -1 for none."""
    settings: Mapping[str, Value]
    """The run's configuration under flat names."""
    description: Mapping[str, Value]
    """The run's metadata under flat names."""


class Sink(Protocol):
    """A run in the hands of another tool.

    What a method was given is safe with the tool when it returns. A bridge that was killed may hand over its last
    piece a second time: the sink sees to it that it does not stand there twice.
    """

    @property
    def address(self) -> Address:
        """Where a later process finds the run."""
        ...

    def forget(self, after: int) -> bool:
        """Take back what came after that iteration; False if the tool cannot do that."""
        ...

    def iteration(self, figures: Figures) -> None:
        """Take an iteration; their numbers increase, but for those that were forgotten."""
        ...

    def history(self, lines: Sequence[str], iteration: int) -> None:
        """Take the whole history of the run in place of what was told before; `iteration` is the last one taken."""
        ...

    def close(self, outcome: str | None) -> None:
        """Finish; `outcome` is ``finished`` or ``failed``, or None if the run may go on."""
        ...


Connect = Callable[[Opening], Sink]
"""Reach the tool; ConfigError if that cannot be done."""
