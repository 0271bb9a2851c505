"""The runs below a folder, and the networks of an episode with their seeds' lives, as JSON values."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from esper.errors import RunError
from esper.runs.events import EpisodeStarted, LifecycleTransition, StepTaken
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, is_grower
from esper.runs.views import OF_DECISION, STAGE_COLUMNS

DEPTH = 3
"""Levels of folders that are searched for runs."""


@dataclass(frozen=True)
class RunFinder:
    """Searches folders for runs, at each call anew."""

    places: tuple[Path, ...]
    """Run directories, and folders that contain some."""

    def find(self) -> dict[str, Path]:
        """Run stores by the names of their runs, which are paths below the places."""
        stores: dict[str, Path] = {}
        for place in self.places:
            for store in _find_stores(place, DEPTH):
                run = store.parent
                name = _to_text(Path(place.absolute().name) if run == place else run.relative_to(place))
                # Of two runs with the same name, the second has its full path as its name.
                stores.setdefault(_to_text(run) if name in stores else name, store)
        return stores

    def store(self, name: str) -> Path:
        store = self.find().get(name)
        if store is None:
            raise RunError(f"there is no run {name!r} here: it was moved or deleted, or never was; choose another")
        return store


def _find_stores(folder: Path, depth: int) -> Iterator[Path]:
    try:
        store = RunDirectory(folder).store
        if store.is_file():
            yield store
        elif depth:
            with os.scandir(folder) as entries:
                inner = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
            for name in inner:
                yield from _find_stores(folder / name, depth - 1)
    except OSError:
        return  # not a folder, not readable, or deleted meanwhile


def _to_text(path: Path) -> str:
    """A path as text that can be sent, whatever bytes its names are made of."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


DAMAGED = "damaged"
"""The only key of a payload that cannot be read."""
DEEPEST = 60
"""Levels of nesting that are kept; no event has more than five."""
_LAST_ITERATION = 2**62
_COLUMNS = {stage: column for column, stage in STAGE_COLUMNS.items()}
Fields = dict[str, Any]


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """A JSON value with None for numbers that are not finite, and below ``depth``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: plain(inner, depth - 1) for key, inner in items} if depth else None
    if isinstance(value, list | tuple):
        return [plain(inner, depth - 1) for inner in cast("Sequence[Any]", value)] if depth else None
    return value


def read_payload(text: str) -> Fields:
    """An event's fields, or the beginning of a damaged event's text."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = None
    return cast("Fields", plain(payload)) if isinstance(payload, dict) else {DAMAGED: str(text)[:200]}


Events = defaultdict[str, list[Fields]]
"""The events of one network in an episode by type, in order."""


class Episode(NamedTuple):
    """The number of an episode, and those of the run's first and last one."""

    number: int
    first: int
    last: int

    @classmethod
    def find(cls, reader: RunReader, metadata: Mapping[str, Any], number: int | None = None) -> Self | None:
        """The episode with this number, or the newest; None if there are none yet."""
        rows = reader.rows(
            # GROUP BY: without it there would be a row of NULLs if there are no events.
            "SELECT min(iteration) AS iteration, max(iteration) AS iteration FROM events "
            "WHERE type IN (?, ?) GROUP BY NULL",
            StepTaken.name,
            EpisodeStarted.name,
        )
        if not rows:
            return None
        # In training, an episode has the number of its iteration; the only one of a `Grower` spans all iterations.
        first, last = (1, 1) if is_grower(metadata) else rows[0]
        if number is not None and not first <= number <= last:
            raise RunError(f"there is no episode {number} in this run: choose one from {first} to {last}")
        return cls(last if number is None else number, first, last)


def read_networks(
    reader: RunReader,
    metadata: Mapping[str, Any],
    episode: Episode | None,
    types: Sequence[str],
    environment: int | None = None,
) -> dict[int, Events]:
    """The networks of an episode by number, with their events of these types; one if `environment` is given."""
    networks: dict[int, Events] = {} if environment is None else {environment: Events(list)}
    if episode is not None:
        low, high = (0, _LAST_ITERATION) if is_grower(metadata) else (episode.number, episode.number)
        for record in reader.records_within(low, high, types, environment):
            fields = read_payload(record.payload)
            if isinstance(number := fields.get("environment"), int):
                networks.setdefault(number, Events(list))[record.type].append(fields)
    return dict(sorted(networks.items()))


def describe_ending(network: Events) -> Fields | None:
    """A network's slots after the end of growth, as a step after its last decision."""
    last = next(reversed(network[StepTaken.name]), Fields())
    stage_by_slot = {
        change.get("slot"): str(change.get("after"))
        for change in network[LifecycleTransition.name]
        if change.get("cause") == "finish" and change.get("step") == last.get("step")
    }
    if not stage_by_slot:
        return None

    def reset_pruned(name: str, default: object) -> list[object]:
        values = last.get(name) or ()
        return [default if stage_by_slot.get(slot) == "pruned" else value for slot, value in enumerate(values)]

    return {
        "step": last["step"] + 1,
        "stages": [stage_by_slot.get(slot, stage) for slot, stage in enumerate(last.get("stages") or ())],
        "blueprints": reset_pruned("blueprints", None),
        "alphas": reset_pruned("alphas", 0.0),
    }


def describe_seeds(network: Events) -> list[Fields]:
    """The lives of a network's seeds in the order of germination.

    The SQL view ``seeds`` has the same rows, but reads the whole run: too slow for every second.
    """
    rows: list[Fields] = []
    current: dict[int, Fields] = {}
    # Fields are checked, since a store may be damaged or foreign.
    for change in network[LifecycleTransition.name]:
        slot, stage = change.get("slot"), change.get("after")
        if not isinstance(slot, int):
            continue
        # A new seed: germinated, or a fossil that the network starts with.
        if stage == "germinated" or change.get("cause") == "start":
            blueprint, step = change.get("blueprint"), change.get("step")
            current[slot] = {"slot": slot, "blueprint": blueprint, "germinated": step, "outcome": "unfinished"}
            rows.append(current[slot])
        if (seed := current.get(slot)) is None:
            continue
        if isinstance(stage, str) and stage in _COLUMNS:
            seed.setdefault(_COLUMNS[stage], change.get("step"))
        if stage in ("fossilized", "pruned"):
            seed["outcome"] = stage
            seed |= {name: change.get(name) for name in ("cause", *OF_DECISION.split())}
    return rows
