"""Where runs go, and whether they are safe there."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

_SHARED = frozenset({"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"})
"""SQLite's write-ahead log needs shared memory between all that have it open, which these do not give."""


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
    kind = file_system(nearest.resolve(), _mounts())
    return RunsFolder(str(folder), _obstacle(nearest), shutil.disk_usage(nearest).free, kind, _wal_safe(kind))


def file_system(path: Path, mounts: str) -> str | None:
    """The type of the file system that holds ``path``, by the text of Linux's ``mountinfo``."""
    found: dict[Path, str] = {}
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        found[Path(_unescaped(place.split()[4]))] = source.split()[0]  # what was mounted last covers what was before
    return next((found[place] for place in (path, *path.parents) if place in found), None)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _mounts() -> str:
    try:
        return MOUNTS.read_text()
    except OSError:
        return ""


def _wal_safe(kind: str | None) -> bool | None:
    return None if kind is None else kind not in _SHARED and not kind.startswith("fuse")


def _obstacle(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return None
