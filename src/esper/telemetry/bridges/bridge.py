"""Carries what is new in a run over to another tool, and keeps count of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from esper.errors import ConfigError
from esper.telemetry.bridges.cursor import load_cursor, save_cursor
from esper.telemetry.bridges.flat import flat
from esper.telemetry.bridges.sink import Connect, Opening, Sink, Value
from esper.telemetry.bridges.tail import Tail

POLL_SECONDS = 1.0
"""Between looks at a run that goes on."""


@dataclass(frozen=True)
class Goal:
    """Where a run is to go."""

    tool: str
    connect: Connect
    destination: str | None
    """None for the tool's default, or where the run is already."""


class Bridge:
    """Hands over one iteration after the other, and remembers each at once, durably.

    A resumed run makes the iterations after its checkpoint anew, with equal figures: a tool that can forget forgets
    them first, any other keeps the first ones.
    """

    def __init__(self, tail: Tail, folder: Path, goal: Goal, name: str, settings: Mapping[str, Value]) -> None:
        """The cursor is kept in `folder`, which exists.

        Raises:
            ConfigError: the run goes to another destination already.
            RunError: the cursor cannot be read.
        """
        self._tail = tail
        self._folder = folder
        self._goal = goal
        self._name = name
        self._settings = settings
        self._file = folder / f"{goal.tool}.json"
        self._cursor = load_cursor(self._file)
        self._sink: Sink | None = None
        self._outcome: str | None = None
        self._require_same_destination()

    def carry(self) -> int:
        """Hand over what is new, and return how many iterations that were."""
        history, carried = self._tail.history(), 0
        self._outcome = history[-1].outcome if history else None
        for moment in history[self._cursor.moments :]:
            if moment.begins and moment.iteration < self._cursor.iteration:
                self._rewind(moment.iteration)
        self._remember(moments=len(history))
        while (figures := self._tail.figures(self._cursor.iteration)) is not None:
            self._opened().iteration(figures)
            self._remember(iteration=figures.number)
            carried += 1
        # Before the first iteration the run's metadata are not complete.
        if len(history) > self._cursor.told and self._cursor.iteration >= 0:
            self._opened().history([moment.line for moment in history], self._cursor.iteration)
            self._remember(told=len(history))
        return carried

    def follow(self, in_use: Callable[[], bool], show: Callable[[int], None]) -> None:
        """Carry until the run has ended and nobody uses it; ``show`` is told of iterations that were handed over."""
        while True:
            idle = not in_use()
            if carried := self.carry():
                show(carried)
            if idle and self._outcome is not None:
                return
            time.sleep(POLL_SECONDS)

    @property
    def destination(self) -> str | None:
        """Where the figures went; None as long as there are none."""
        return None if self._cursor.address is None else self._cursor.address.destination

    def close(self) -> None:
        """Let go of the tool, if it was reached."""
        if self._sink is not None:
            self._sink.close(self._outcome)

    def _require_same_destination(self) -> None:
        asked, known = self._goal.destination, self.destination
        if asked is not None and known is not None and asked != known:
            raise ConfigError(f"the run goes to {known} already: give no other destination, or remove {self._file}")

    def _rewind(self, iteration: int) -> None:
        if self._opened().forget(iteration):
            self._remember(iteration=iteration)

    def _opened(self) -> Sink:
        if self._sink is None:
            cursor = self._cursor
            destination = self._goal.destination
            description = flat(self._tail.metadata())
            self._sink = self._goal.connect(
                Opening(
                    self._name,
                    self._folder,
                    destination,
                    cursor.address,
                    cursor.iteration,
                    self._settings,
                    description,
                )
            )
            self._remember(address=self._sink.address)
        return self._sink

    def _remember(self, **news: object) -> None:
        changed = replace(self._cursor, **news)
        if changed != self._cursor:
            save_cursor(self._file, changed)
            self._cursor = changed
