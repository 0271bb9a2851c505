"""What there is to tell other tools of a run: its finished iterations, one by one, and its history.

It is no `StoreFollower`: a bridge goes on, perhaps days later, after an iteration that its file names.
Scalars have no ids to go on from, but iterations have numbers: one is finished when the event that closes it is there,
for all else that belongs to it was committed before. That a run was rewound shows in its history, which no rewind
touches; ids of events would not show it, since those of deleted ones may be given again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from esper.runs.events import (
    AnomalyRaised,
    EpisodeEnded,
    Event,
    LifecycleTransition,
    PPOUpdated,
    RolledBack,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
    StepTaken,
    event_types,
    fields,
)
from esper.runs.reader import RunReader

E = TypeVar("E", bound=Event)

_CLOSING = {"train": PPOUpdated.name, "grow": StepTaken.name}
"""The last event of an iteration, by the command that made the run."""
_COUNTED = ("germinated", "training", "blending", "holding", "fossilized", "pruned")
"""Stages of a seed's life."""
_SETTLED = ("fossilized", "pruned")
_BEGINNINGS = (RunStarted.name, RunResumed.name)
_OUTCOMES = {RunEnded.name: "finished", RunFailed.name: "failed"}


@dataclass(frozen=True, slots=True)
class Figures:
    """A finished iteration."""

    number: int
    time: float
    """Seconds since 1970 when it was finished."""
    scalars: dict[str, float]
    """Those of the store, NaN included, and how many seeds entered each stage."""
    samples: dict[str, list[float]]
    """Objectives of the episodes that ended, and contributions of the seeds that were kept or pruned."""
    notes: list[str]
    """Rollbacks and anomalies, in a line each."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A start, a stop or the end of the run, after `iteration`."""

    iteration: int
    line: str
    begins: bool
    """Whatever came after `iteration` before is made anew."""
    outcome: str | None
    """``finished`` or ``failed`` if the run ends here."""


class Tail(RunReader):
    """A reader of what a run has come to, piece by piece."""

    def history(self) -> list[Moment]:
        """All starts and stops of the run, in order."""
        names = [name for name, event_type in event_types().items() if event_type.history]
        rows = self.rows(
            f"SELECT time, type, iteration, payload FROM events WHERE type IN ({_marks(names)}) ORDER BY id", *names
        )
        with self.name_store_in_errors():
            return [_moment(*row) for row in rows]

    def figures(self, after: int) -> Figures | None:
        """The first finished iteration after the one of that number; None if there is none yet."""
        with self.snapshot():
            closing = _CLOSING.get(self.metadata().get("command", ""), PPOUpdated.name)
            found = self.rows(
                "SELECT iteration FROM scalars WHERE iteration > ? "
                "AND iteration <= (SELECT max(iteration) FROM events WHERE type = ?) ORDER BY iteration LIMIT 1",
                after,
                closing,
            )
            if not found:
                return None
            ((number,),) = found
            # What precedes the first iteration is closed with it.
            ((time,),) = self.rows(
                "SELECT time FROM events WHERE type = ? AND iteration >= ? ORDER BY iteration LIMIT 1", closing, number
            )
            return self._figures(number, time)

    def _figures(self, number: int, time: float) -> Figures:
        changes = self._of(LifecycleTransition, number)
        entered = Counter(change.after for change in changes)
        settled = [change.contribution for change in changes if change.after in _SETTLED]
        samples = {
            "episode/objective": [end.objective for end in self._of(EpisodeEnded, number)],
            "seed/contribution": [value for value in settled if value is not None],
        }
        troubles = Counter(rollback.trouble for rollback in self._of(RolledBack, number))
        anomalies = self._of(AnomalyRaised, number)
        return Figures(
            number,
            time,
            {**self.scalars_at(number), **{f"lifecycle/{stage}": float(entered[stage]) for stage in _COUNTED}},
            {name: finite for name, values in samples.items() if (finite := list(filter(math.isfinite, values)))},
            [
                *(f"rolled back {count} times: {trouble}" for trouble, count in sorted(troubles.items())),
                *(f"{one.anomaly}: {one.meaning}" for one in anomalies),
            ],
        )

    def _of(self, event_type: type[E], iteration: int) -> list[E]:
        rows = self.rows(
            "SELECT version, payload FROM events WHERE type = ? AND iteration = ? ORDER BY id",
            event_type.name,
            iteration,
        )
        return self._decode(event_type, rows)


def _marks(names: Sequence[str]) -> str:
    return ", ".join("?" for _ in names)


def _moment(time: float, name: str, iteration: int, payload: str) -> Moment:
    when = datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    details = [f"{key} {value}" for key, value in fields(name, payload).items() if key != "iteration"]
    line = f"{when}: {name.replace('_', ' ')} after iteration {iteration}"
    return Moment(
        iteration,
        f"{line} ({', '.join(details)})" if details else line,
        name in _BEGINNINGS,
        _OUTCOMES.get(name),
    )
