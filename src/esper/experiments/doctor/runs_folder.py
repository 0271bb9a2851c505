"""Where runs go, and whether they are safe there."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from esper.telemetry.file_system import file_system_of, wal_safe


@dataclass(frozen=True)
class RunsFolder:
    """A folder that may not exist yet; then its nearest parent is examined."""

    path: str
    obstacle: str | None
    """Why nothing can be written there."""
    free: int
    """Bytes."""
    file_system: str | None
    """Its type; None where the system does not tell."""
    wal_safe: bool | None
    """Whether SQLite's write-ahead log can be relied on there."""

    @property
    def writable(self) -> bool:
        """Whether runs can be made there."""
        return self.obstacle is None


def examine_folder(path: Path) -> RunsFolder:
    """Try it out, leaving no trace."""
    folder = path.absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    kind = file_system_of(nearest)
    return RunsFolder(str(folder), _obstacle(nearest), shutil.disk_usage(nearest).free, kind, wal_safe(kind))


def _obstacle(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return None
