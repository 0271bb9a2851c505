"""The runs in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from esper.errors import RunError
from esper.experiments.lock import held
from esper.experiments.run_directory import RunDirectory
from esper.experiments.run_state import OBJECTIVE, Progress, State, progress_of
from esper.telemetry.reader import RunReader


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as a list shows it."""

    path: Path
    progress: Progress
    size: int
    """Of all its files, in bytes."""
    trouble: str | None
    """Why its store cannot be read."""


def runs_in(folder: Path) -> list[ListedRun]:
    """Those directly in the folder, the newest first.

    Raises:
        RunError: there is no such folder, or it cannot be read.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if _is_run(path))
    except OSError as error:
        raise RunError(f"cannot list {folder} ({error.strerror}): give a folder that has runs in it") from error
    return sorted(map(_listed, paths), key=lambda run: run.progress.started or 0.0, reverse=True)


def _is_run(path: Path) -> bool:
    run = RunDirectory(path)
    return run.config.is_file() and (run.store.is_file() or run.lock.is_file())


def _listed(path: Path) -> ListedRun:
    run = RunDirectory(path)
    size = sum(_sizes(path))
    if not run.store.is_file():
        return ListedRun(path, _unknown(State.RUNNING if held(run.lock) else State.INTERRUPTED), size, None)
    try:
        with RunReader.open(run.store) as reader:
            return ListedRun(path, progress_of(run, reader), size, None)
    except RunError as error:
        return ListedRun(path, _unknown(State.DAMAGED), size, str(error))


def _unknown(state: State) -> Progress:
    return Progress("?", state, 0, None, OBJECTIVE, None, None, None)


def _sizes(path: Path) -> Iterator[int]:
    for file in path.rglob("*"):
        try:
            if file.is_file() and not file.is_symlink():
                yield file.stat().st_size
        except OSError:  # it went away meanwhile
            continue
