"""The directory that a run leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from esper.errors import RunError


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps its files."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the directory of a new run.

        Raises:
            RunError: it holds something already, or cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(
                    f"{path} is not empty: choose a new directory, or go on with `esper train --resume {path}`"
                )
            run = cls(path)
            run.checkpoints.mkdir()
        except OSError as error:
            raise RunError(f"cannot make the run directory {path} ({error.strerror}): choose another place") from error
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Take up the directory of an existing run.

        Raises:
            RunError: it is missing or is not the directory of a run.
        """
        if not path.exists():
            raise RunError(f"no run at {path}: give a directory that `esper train` made")
        run = cls(path)
        for needed in (run.config, run.store):
            if not needed.is_file():
                raise RunError(
                    f"{path} is not a run, it has no {needed.name}: give a directory that `esper train` made"
                )
        return run

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def store(self) -> Path:
        """The run store (SQLite)."""
        return self.path / "run.db"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """The report for people."""
        return self.path / "report.html"

    @property
    def evaluation(self) -> Path:
        """The records of `esper evaluate`, one per controller and instance."""
        return self.path / "evaluation.json"

    @property
    def behaviour(self) -> Path:
        """What the policy did in `esper evaluate`: its habits per family and a few whole episodes."""
        return self.path / "behaviour.json"
