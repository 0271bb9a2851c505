"""What kind of file system holds a run, and whether SQLite's write-ahead log can be relied on there."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

_SHARED = frozenset({"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"})
"""The log needs shared memory between all that have it open, which these do not give."""


def file_system_of(path: Path) -> str | None:
    """The type of the file system that holds an existing ``path``; None where the system does not tell."""
    return file_system(path.resolve(), _mounts())


def file_system(path: Path, mounts: str) -> str | None:
    """The same for an absolute path, by the text of Linux's ``mountinfo``."""
    found: dict[Path, str] = {}
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        found[Path(_unescape(place.split()[4]))] = source.split()[0]  # what was mounted last covers what was before
    return next((found[place] for place in (path, *path.parents) if place in found), None)


def wal_safe(kind: str | None) -> bool | None:
    """Whether the write-ahead log works on file systems of this type; None for an unknown one."""
    return None if kind is None else kind not in _SHARED and not kind.startswith("fuse")


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _mounts() -> str:
    try:
        return MOUNTS.read_text()
    except OSError:
        return ""
