"""The directory that `esper grow` leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from esper.errors import RunError
from esper.experiments.run_directory import RunDirectory
from esper.grower.recording import COMMAND
from esper.telemetry.reader import RunReader


@dataclass(frozen=True)
class GrowDirectory(RunDirectory):
    """A run directory with a grown model in it."""

    command: ClassVar[str] = "esper grow"

    @classmethod
    def open(cls, path: Path) -> Self:
        """As `RunDirectory.open`; RunError also if a `Grower` wrote it, of whose host and data nothing is known."""
        run = super().open(path)
        if run.store.is_file() and run.store.stat().st_size:
            with RunReader.open(run.store) as reader:
                metadata = reader.metadata()
            if metadata.get("command") == COMMAND and "task" not in metadata:
                raise RunError(
                    f"{path} was written by an esper.Grower in a training loop: go on with it in that loop, and export "
                    "its model there by esper.export"
                )
        return run

    @property
    def model(self) -> Path:
        """The folder of the grown model."""
        return self.path / "model"

    @property
    def result(self) -> Path:
        """What came out, as JSON; written last."""
        return self.path / "result.json"
