"""Where data come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """What a suite declares of its data."""

    words: str
    """Completes "it is ..."."""
    path: Path | None = None
    """The file that is read; None where nothing is."""

    @property
    def found(self) -> bool:
        """Whether all that is read is there."""
        return self.path is None or self.path.is_file()


COMPUTED = Source("computed from its recipe")
