"""The directory that `esper grow` leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from esper.experiments.run_directory import RunDirectory


@dataclass(frozen=True)
class GrowDirectory(RunDirectory):
    """A run directory with a grown model in it."""

    command: ClassVar[str] = "esper grow"

    @property
    def model(self) -> Path:
        """The folder of the grown model."""
        return self.path / "model"

    @property
    def result(self) -> Path:
        """What came out, as JSON; written last."""
        return self.path / "result.json"
