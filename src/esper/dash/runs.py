"""Finding runs under folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from esper.errors import RunError

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
        found: dict[str, Path] = {}
        for place in self.places:
            for store in _stores(place, DEPTH):
                name = _readable(store.parent.relative_to(place)) if store.parent != place else _own_name(place)
                # The same name under two places: the second goes by its whole path.
                found.setdefault(_readable(store.parent) if name in found else name, store)
        return found

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
