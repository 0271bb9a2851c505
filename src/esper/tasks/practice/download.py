"""Where data are kept from one run to the next, and how they get there: whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from esper.errors import TaskError
from esper.files import replace_file


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/esper``, by default ``~/.cache/esper`` (XDG Base Directory Specification)."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    return base / "esper"


def ensure_folder(folder: Path) -> Path:
    """Make the folder unless it is there, and return it.

    Raises:
        TaskError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TaskError(
            f"cannot make the folder {folder} ({error.strerror}): set XDG_CACHE_HOME to a writable place"
        ) from error
    return folder


SECONDS = 30.0
"""Without a byte, until a server counts as silent."""
CHUNK = 1 << 20


@dataclass(frozen=True)
class Remote:
    """A file somewhere, and what it must be."""

    url: str
    md5: str
    """As its publisher states it: against damage, not against forgery."""
    most_bytes: int
    """More than this is something else."""


def fetch(remote: Remote, path: Path) -> None:
    """Put the file at ``path``, in one step once it has proved right.

    Raises:
        TaskError: it cannot be had, or is not what it should be; nothing is left behind.
        RunError: it cannot be written.
    """
    ensure_folder(path.parent)
    digest = hashlib.md5(usedforsecurity=False)
    with replace_file(path) as temporary, temporary.open("wb") as file:
        for chunk in _receive(remote):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != remote.md5:
            raise TaskError(f"{remote.url} gave something else, its md5 is not {remote.md5}: try again later")
        file.flush()
        os.fsync(file.fileno())


def _receive(remote: Remote) -> Iterator[bytes]:
    """The file, piece by piece."""
    size = 0
    try:
        with urllib.request.urlopen(remote.url, timeout=SECONDS) as answer:
            while chunk := answer.read(CHUNK):
                size += len(chunk)
                if size > remote.most_bytes:
                    raise TaskError(f"{remote.url} gave more than {remote.most_bytes} bytes: it is another file")
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise TaskError(f"cannot download {remote.url} ({error}): try again, or put the file there yourself") from error


def md5_of(path: Path) -> str:
    """The MD5 digest of a file, in hexadecimal; OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
