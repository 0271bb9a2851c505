"""Where data are kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path

from esper.errors import TaskError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/esper``, by default ``~/.cache/esper`` (XDG Base Directory Specification)."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    return base / "esper"


def made(folder: Path) -> Path:
    """The folder, now there.

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
