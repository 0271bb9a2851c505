"""The runs below a folder, and the networks of an episode with their seeds' lives, as plain JSON values."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from esper.errors import RunError
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    GateJudged,
    LifecycleTransition,
    PolicyLooked,
    RolledBack,
    StepTaken,
)
from esper.runs.reader import EventRecord, RunReader

STORE = "run.db"
DEPTH = 3
"""Levels of folders below a given one in which runs are looked for."""


@dataclass(frozen=True)
class RunFinder:
    """Looks for runs anew whenever it is asked, so that new ones show and vanished ones do not."""

    places: tuple[Path, ...]
    """Run directories, and folders that contain some."""

    def find(self) -> dict[str, Path]:
        """Run stores by the names of their runs; nothing outside of the given places ever has a name."""
        stores: dict[str, Path] = {}
        for place in self.places:
            for store in _stores(place, DEPTH):
                name = _readable(store.parent.relative_to(place)) if store.parent != place else _own_name(place)
                # The same name under two places: the second goes by its whole path.
                stores.setdefault(_readable(store.parent) if name in stores else name, store)
        return stores

    def store(self, name: str) -> Path:
        """The store of the run of that name; RunError if there is none."""
        store = self.find().get(name)
        if store is None:
            raise RunError(f"there is no run {name!r} here: it was moved or deleted, or never was; choose another")
        return store


def _stores(folder: Path, depth: int) -> Iterator[Path]:
    try:
        store = folder / STORE
        if store.is_file():
            yield store
        elif depth:
            with os.scandir(folder) as entries:
                inner = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
            for name in inner:
                yield from _stores(folder / name, depth - 1)
    except OSError:
        return  # not a folder, not ours to read, or gone meanwhile


def _own_name(place: Path) -> str:
    return _readable(Path(place.absolute().name))


def _readable(path: Path) -> str:
    """As text that can be sent, whatever bytes a name is made of."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


DAMAGED = "damaged"
"""The only key of a payload that cannot be read."""
DEEPEST = 60
"""Levels of nesting that are kept; no event has more than five."""
_EVER = 2**62
_STAGE_COLUMNS = {
    "germinated": "germinated",
    "training": "trained",
    "blending": "blended",
    "holding": "held",
    "fossilized": "fossilized",
    "pruned": "pruned",
}
"""Column of the step at which a seed first came to a stage."""
Fields = dict[str, Any]
"""An event's fields, as JSON."""


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """The same value with None for numbers that JSON has no word for, and for what is nested beyond reason."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: plain(inner, depth - 1) for key, inner in items} if depth else None
    if isinstance(value, list):
        return [plain(inner, depth - 1) for inner in cast("list[Any]", value)] if depth else None
    return value


def read_payload(text: str) -> Fields:
    """An event's fields; under `DAMAGED` what is there instead of them."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = None
    return cast("Fields", plain(payload)) if isinstance(payload, dict) else {DAMAGED: str(text)[:200]}


@dataclass(frozen=True)
class Episode:
    """An episode of a run, and which ones there are."""

    number: int
    first: int
    last: int
    alone: bool
    """Whether the run is that of a model that grows alone: its one episode spans all iterations."""

    @classmethod
    def find(cls, reader: RunReader, metadata: Mapping[str, Any], number: int | None = None) -> Self | None:
        """The episode of that number, or the newest; None where there is none yet.

        Raises:
            RunError: there is no episode of that number.
        """
        rows = reader.rows(
            # Without a group there would be a row of NULLs where there are no events.
            "SELECT min(iteration) AS iteration, max(iteration) AS iteration FROM events "
            "WHERE type IN (?, ?) GROUP BY NULL",
            *(StepTaken.name, EpisodeStarted.name),
        )
        if not rows:
            return None
        alone = metadata.get("command") == "grow"
        first, last = (1, 1) if alone else rows[0]
        if number is not None and not first <= number <= last:
            raise RunError(f"there is no episode {number} in this run: choose one from {first} to {last}")
        return cls(last if number is None else number, first, last, alone)

    def place(self) -> dict[str, int]:
        """Its number, among those that there are."""
        return {"number": self.number, "first": self.first, "last": self.last}

    def records(self, reader: RunReader, types: Sequence[str], environment: int | None = None) -> list[EventRecord]:
        """The episode's events of some types, in order; of one network if one is given."""
        low, high = (0, _EVER) if self.alone else (self.number, self.number)
        return reader.records_within(low, high, types, environment)


@dataclass
class NetworkView:
    """What an episode's events tell of one network."""

    number: int
    events: defaultdict[str, list[Fields]] = field(default_factory=lambda: defaultdict[str, list[Fields]](list))
    """The network's events by type, in order."""

    @property
    def started(self) -> Fields | None:
        """How its episode began, if that is told."""
        return next(iter(self.events[EpisodeStarted.name]), None)

    @property
    def ended(self) -> Fields | None:
        """How its episode ended; None while it goes on."""
        return next(iter(self.events[EpisodeEnded.name]), None)

    @property
    def decisions(self) -> list[Fields]:
        """Its decisions, and how it stood afterwards."""
        return self.events[StepTaken.name]

    @property
    def transitions(self) -> list[Fields]:
        """Changes of its slots' stages."""
        return self.events[LifecycleTransition.name]

    @property
    def ending(self) -> Fields | None:
        """How its slots stood once the end of growth had judged its seeds, as one step after its last decision."""
        last = self.decisions[-1] if self.decisions else {}
        judged = {
            change.get("slot"): str(change.get("after"))
            for change in self.transitions
            if change.get("cause") == "finish" and change.get("step") == last.get("step")
        }
        if not judged:
            return None
        stages = [judged.get(slot, stage) for slot, stage in enumerate(last.get("stages") or ())]

        def unless_pruned(name: str, gone: object) -> list[object]:
            values = last.get(name) or ()
            return [gone if judged.get(slot) == "pruned" else value for slot, value in enumerate(values)]

        return {
            "step": last["step"] + 1,
            "stages": stages,
            "blueprints": unless_pruned("blueprints", None),
            "alphas": unless_pruned("alphas", 0.0),
        }

    @property
    def gates(self) -> list[Fields]:
        """New verdicts of gates."""
        return self.events[GateJudged.name]

    @property
    def rollbacks(self) -> list[Fields]:
        """Rollbacks by the governor."""
        return self.events[RolledBack.name]

    @property
    def looks(self) -> list[Fields]:
        """What the policy saw of it."""
        return self.events[PolicyLooked.name]

    def seeds(self) -> list[Fields]:
        """Its seeds' lives, a row each in the order of their births.

        The view ``seeds`` says the same of a whole run, which it has to read for it: too slow to ask every second.
        """
        rows: list[Fields] = []
        current: dict[int, Fields] = {}
        for change in self.transitions:
            slot, stage = change.get("slot"), change.get("after")
            if not isinstance(slot, int):
                continue
            if stage == "germinated" or change.get("cause") == "start":
                current[slot] = {
                    "slot": slot,
                    "blueprint": change.get("blueprint"),
                    "germinated": change.get("step"),
                    "outcome": "unfinished",
                }
                rows.append(current[slot])
            if (seed := current.get(slot)) is None:
                continue
            if isinstance(stage, str) and stage in _STAGE_COLUMNS:
                seed.setdefault(_STAGE_COLUMNS[stage], change.get("step"))
            if stage in ("fossilized", "pruned"):
                seed |= {"outcome": stage, "cause": change.get("cause"), "contribution": change.get("contribution")}
        return rows


def read_networks(
    reader: RunReader,
    episode: Episode,
    types: Sequence[str],
    environment: int | None = None,
) -> dict[int, NetworkView]:
    """The networks of an episode by number, with their events of these types; one alone if it is named."""
    networks: dict[int, NetworkView] = {}
    for record in episode.records(reader, types, environment):
        fields = read_payload(record.payload)
        if isinstance(number := fields.get("environment"), int):
            networks.setdefault(number, NetworkView(number)).events[record.type].append(fields)
    return dict(sorted(networks.items()))
