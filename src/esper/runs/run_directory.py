"""Runs on disk: the directory that one leaves behind, what has become of it, and the runs in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from filelock import lock_descriptor

from esper.errors import RunError
from esper.files import TEMPORARY_SUFFIX
from esper.runs.events import RunEnded, RunFailed, RunInterrupted, RunResumed, RunStarted
from esper.runs.metric import Metric
from esper.runs.reader import EventRecord, RunReader
from esper.runs.store import RunStore

_TRIES = 5
_RETRY_SECONDS = 0.02
"""Whoever only looks whether a lock is held has it for less than that."""


@contextmanager
def hold(path: Path, what: str) -> Generator[None]:
    """Hold the lock on the file at `path`, which says that `what` is running.

    The file stays: deleting it would let two processes lock two files of one name.

    Raises:
        RunError: another process holds it, it cannot be written, or the file system has no locks.
    """
    folder = path.parent
    try:
        # Not inherited: Python opens files such that no process it starts gets them.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(f"cannot write in {folder} ({error.strerror}): make it writable, or work on a copy") from error
    try:
        try:
            if not _take(descriptor):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise RunError(f"run {folder} is in use by {holder}: wait until it ends, or stop it")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"`{what}` (process {os.getpid()})".encode())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise RunError(f"cannot write in {folder} ({error.strerror}): free some space") from error
            advice = "move the run to a file system that has locks"
            raise RunError(f"cannot lock {folder} ({error.strerror}): {advice}") from error
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on the file at `path`; False where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that whoever looks hinders no other who looks; filelock's lock is an exclusive `flock`.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int) -> bool:
    """Whether an open file could be locked; closing it, or the end of the process, gives the lock back."""
    for left in reversed(range(_TRIES)):
        if lock_descriptor(descriptor, blocking=False):
            return True
        if left:
            time.sleep(_RETRY_SECONDS)
    return False


STUDY = "study.db"
"""The SQLite file of the study of `esper sweep`, in the sweep's folder."""
GROWER = "esper.Grower"
"""What makes the runs of models that grow in a loop of their owner's."""
RUN_ADVICE = f"give the directory of a run of `esper train` or `{GROWER}`"
_HOLDING = {
    "esper train": "it holds a controller, which `esper evaluate {run}` compares",
    GROWER: "it tells of a model that grew in a training loop, which `esper report {run}` shows; go on with it in that "
    "loop, and export its model there by esper.export",
}
"""What runs are good for, by what made them."""


def maker_of(metadata: Mapping[str, Any]) -> str:
    """What made a run, as its metadata say: a command, or a `Grower`."""
    command = metadata.get("command")
    return GROWER if command == "grow" else f"esper {command}"


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps its files."""

    command: ClassVar[str] = "esper train"
    """What makes such directories, and goes on with them by ``--resume``."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the directory of a new run; what is left of a start that was killed at once is no hindrance.

        Raises:
            RunError: it holds something already, or cannot be made.
        """
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run.require_empty()
            run.checkpoints.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"cannot make the run directory {path} ({reason}): choose another place") from error
        return run

    @classmethod
    def open(cls, path: Path, advice: str = RUN_ADVICE) -> Self:
        """Take up the directory of an existing run, which may have been killed before its store was made.

        ``advice`` is given where there is none.

        Raises:
            RunError: it is missing or is not the directory of a run.
        """
        if not os.path.exists(path):  # unlike Path.exists, it takes names that no file can have
            raise RunError(f"no run at {path}: {advice}")
        run = cls(path)
        begun = run.lock.is_file() and not any(run.checkpoints.glob("*"))
        for needed in (run.config, run.lock if begun else run.store):
            if not needed.is_file():
                raise RunError(f"{path} is not a run, it has no {needed.name}: {advice}")
        return run

    @classmethod
    def open_training_run(cls, path: Path) -> Self:
        """As `open`, but only a run that `command` made.

        Raises:
            RunError: as `open`; or another command made it.
        """
        run = cls.open(path, f"give the directory of a run of `{cls.command}`")
        made_by = run.made_by()
        if made_by != cls.command and made_by in _HOLDING:
            raise RunError(f"{path} is a run of `{made_by}`, and not of `{cls.command}`: {run.describe_use(made_by)}")
        return run

    def require_empty(self) -> None:
        """RunError if there is anything that a start which was killed at once does not leave."""
        for child in self.path.iterdir():
            empty = child == self.checkpoints and not any(child.iterdir())
            if not (empty or child == self.lock or child.name.endswith(TEMPORARY_SUFFIX)):
                raise RunError(f"{self.path} is not empty: choose a new directory{self._instead()}")

    def _instead(self) -> str:
        """What else can be done where there is something already."""
        if not (self.config.is_file() and self.has_store):
            return ""
        made_by = self.made_by()
        if made_by == self.command:
            return f", or go on with `{self.command} --resume {shlex.quote(str(self.path))}`"
        return f"; this is a run of `{made_by}`: {self.describe_use(made_by)}" if made_by in _HOLDING else ""

    def made_by(self) -> str:
        """What made the run; the command of this class where it was killed before that was told."""
        if not self.has_store:
            return self.command
        with RunReader.open(self.store) as reader:
            metadata = reader.metadata()
        return maker_of(metadata) if "command" in metadata else self.command

    def describe_use(self, made_by: str) -> str:
        """What the run is good for, if that made it."""
        return _HOLDING[made_by].format(run=shlex.quote(str(self.path)))

    def locked(self, what: str) -> AbstractContextManager[None]:
        """Hold the run for oneself while writing to it; whoever else tries is told that `what` is running.

        Raises:
            RunError: another process holds it, or the directory cannot be written or locked.
        """
        return hold(self.lock, what)

    def open_store(self) -> RunStore:
        """The run store for writing; made now if the run was killed before it was.

        Raises:
            RunError: it is damaged, held by somebody, or cannot be written.
        """
        return RunStore.open(self.store) if self.has_store else RunStore.create(self.store)

    @property
    def has_store(self) -> bool:
        """Whether the store is made; a run that was killed at once may have none, or an empty file."""
        return self.store.is_file() and self.store.stat().st_size > 0

    @property
    def lock(self) -> Path:
        """Locked by the process that writes to the run."""
        return self.path / "run.lock"

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
    def loggers(self) -> Path:
        """The folder of what loggers keep: files of TensorBoard, and where W&B and MLflow have the run."""
        return self.path / "loggers"

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

    @property
    def verdicts(self) -> Path:
        """Who is better by `evaluation`, in figures and words, for the dashboard; written with the report."""
        return self.path / "verdicts.json"

    @property
    def evaluation_progress(self) -> Path:
        """What an `esper evaluate` under way has finished so far."""
        return self.path / "evaluation-progress"


OBJECTIVE = Metric("J")
"""What training runs are about: the scalar ``objective``."""


class State(StrEnum):
    """Where a run is in its life."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """It stopped or was killed before its end, and can be resumed."""
    FAILED = "failed"
    DAMAGED = "damaged"
    """Its store cannot be read."""


LIFE = (RunStarted, RunResumed, RunInterrupted, RunFailed, RunEnded)
"""Events that begin or end a process of a run."""
_ENDS = {RunEnded.name: RunState.FINISHED, RunFailed.name: RunState.FAILED}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is, and how well it does."""

    command: str
    state: State
    done: int
    """Iterations, or decisions of a `Grower`."""
    total: int | None
    metric: Metric
    """What tells how well the run does: J of a training run, what growth is about of a growing model."""
    value: float | None
    """Of the newest one, on validation data and in units of its own."""
    probe_score: float | None
    """Mean test score of the greedy policy when it was last measured."""
    started: float | None
    """Seconds since 1970."""


def read_progress(run: RunDirectory, reader: RunReader) -> RunProgress:
    """A run's progress by its store and its lock."""
    metadata = reader.metadata()
    command, done = str(metadata.get("command", "?")), reader.last_iteration()
    started = reader.newest(RunStarted.name)
    metric, scalar = progress_metric(metadata)
    return RunProgress(
        command,
        read_state(run, reader),
        done,
        _whole(metadata.get("iterations")),
        metric,
        _last(reader, scalar, done - 1),
        _last(reader, "probe_score", -1),
        started[0].time if started else None,
    )


def progress_metric(metadata: Mapping[str, Any]) -> tuple[Metric, str]:
    """What tells how well a run does, and the scalar that holds its values."""
    if metadata.get("command") != "grow":
        return OBJECTIVE, "objective"
    metric = Metric.from_metadata(metadata)
    return metric, metric.scalar


def read_state(run: RunDirectory, reader: RunReader) -> State:
    """A run that has ended stays so while others, such as `esper evaluate`, use it."""
    newest = _newest_of_life(reader)
    end = _ENDS.get(newest.type) if newest else None
    if end is RunState.FINISHED:
        return end
    return RunState.RUNNING if is_locked(run.lock) else end or RunState.INTERRUPTED


def _newest_of_life(reader: RunReader) -> EventRecord | None:
    records = [record for kind in LIFE for record in reader.newest(kind.name)]
    return max(records, key=lambda record: record.id, default=None)


def _last(reader: RunReader, name: str, after: int) -> float | None:
    series = reader.series(name, after)
    return series[-1][1] if series else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as a list shows it."""

    path: Path
    progress: RunProgress
    size: int
    """Size of all the run's files, in bytes."""
    trouble: str | None
    """Why its store cannot be read."""


def list_runs(folder: Path) -> list[ListedRun]:
    """Those directly in the folder, the newest first.

    Raises:
        RunError: there is no such folder, or it cannot be read.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if _is_run(path))
    except OSError as error:
        raise RunError(f"cannot list {folder} ({error.strerror}): give a folder that has runs in it") from error
    return sorted(map(_describe_run, paths), key=lambda run: run.progress.started or 0.0, reverse=True)


def _is_run(path: Path) -> bool:
    run = RunDirectory(path)
    return run.config.is_file() and (run.store.is_file() or run.lock.is_file())


def _describe_run(path: Path) -> ListedRun:
    run = RunDirectory(path)
    size = sum(_sizes(path))
    if not run.store.is_file():
        return ListedRun(path, _unknown(RunState.RUNNING if is_locked(run.lock) else RunState.INTERRUPTED), size, None)
    try:
        with RunReader.open(run.store) as reader:
            return ListedRun(path, read_progress(run, reader), size, None)
    except RunError as error:
        return ListedRun(path, _unknown(RunState.DAMAGED), size, str(error))


def _unknown(state: State) -> RunProgress:
    return RunProgress("?", state, 0, None, OBJECTIVE, None, None, None)


def _sizes(path: Path) -> Iterator[int]:
    for file in path.rglob("*"):
        try:
            if file.is_file() and not file.is_symlink():
                yield file.stat().st_size
        except OSError:  # it went away meanwhile
            continue
