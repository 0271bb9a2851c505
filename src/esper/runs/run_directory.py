"""Runs on disk: directories, locks, progress, and lists."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from filelock import lock_descriptor

from esper.errors import RunError
from esper.files import LOCK_FILE, TEMPORARY_SUFFIX
from esper.runs.events import RunEnded, RunFailed, RunInterrupted, RunResumed, RunStarted
from esper.runs.reader import RunMetric, RunReader
from esper.runs.store import RunStore

PLAYED = "evaluate"
"""The command in the metadata of runs in which a controller plays and nothing is learned."""
_LOCK_TRIES = 5
_RETRY_SECONDS = 0.02
"""Longer than `is_locked` holds the lock that it tests with."""


@contextmanager
def hold_lock(path: Path, what: str) -> Generator[None]:
    """Lock the file at `path` and write `what`, the running command, into it.

    The file is never deleted; otherwise two processes could lock two files of the same name.
    """
    folder = path.parent
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(f"cannot write in {folder} ({error.strerror}): make it writable, or work on a copy") from error
    try:
        # The command in the file appears in the messages of other processes.
        try:
            for _ in range(_LOCK_TRIES):
                if lock_descriptor(descriptor, blocking=False):
                    break
                time.sleep(_RETRY_SECONDS)
            else:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise RunError(f"run {folder} is in use by {holder}: wait until it ends, or stop it")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"`{what}` (process {os.getpid()})".encode())
        except OSError as error:
            is_full = error.errno == errno.ENOSPC
            advice = "free some space" if is_full else "move the run to a file system that has locks"
            what = "write in" if is_full else "lock"
            raise RunError(f"cannot {what} {folder} ({error.strerror}): {advice}") from error
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file; False where this cannot be determined."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that several processes can test at the same time; filelock's lock is an exclusive `flock`.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


STUDY = "study.db"
"""The SQLite file of the study of `esper sweep`."""
GROWER = "esper.Grower"
"""What makes runs of models that grow in a user's loop."""
RUN_ADVICE = f"give the directory of a run of `esper train` or `{GROWER}`"
_USE = (
    "it records a model that grew in a training loop, which `esper report {run}` shows; go on with it in that "
    "loop, and export its model there by esper.growth.export.export"
)
"""What a run of a `Grower` can be used for."""


class _Child:
    """A path inside a run directory, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, and the paths of its files, which may be missing."""

    command: ClassVar[str] = "esper train"
    """The command that makes and resumes runs of controllers."""

    path: Path

    lock = _Child("run.lock")
    """The lock file; the process that writes to the run holds its lock."""
    config = _Child("config.yaml")
    store = _Child("run.db")
    checkpoints = _Child("checkpoints")
    loggers = _Child("loggers")
    """TensorBoard's files, and the run's addresses at W&B and MLflow."""
    report = _Child("report.html")
    evaluation = _Child("evaluation.json")
    """The records of `esper evaluate`, one per controller and instance."""
    behaviour = _Child("behaviour.json")
    """The policy's behaviour in `esper evaluate`: statistics per family and a few complete episodes."""
    verdicts = _Child("verdicts.json")
    """The verdicts of the evaluation, for the dashboard; written with the report."""
    evaluation_progress = _Child("evaluation-progress")
    """Results of an unfinished `esper evaluate`."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the directory of a new run, or use what one that was killed at its start left behind."""
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run.require_empty()
            run.checkpoints.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: not a possible file name
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"cannot make the run directory {path} ({reason}): choose another place") from error
        return run

    @classmethod
    def open(cls, path: Path, advice: str = RUN_ADVICE) -> Self:
        """Open the directory of a run, even if it was killed before its store was created."""
        if not os.path.exists(path):  # unlike Path.exists, accepts impossible file names
            raise RunError(f"no run at {path}: {advice}")
        run = cls(path)
        # A run that was killed at its start has a lock, but neither a store nor checkpoints.
        has_only_started = run.lock.is_file() and not any(run.checkpoints.glob("*"))
        for file in (run.config, run.lock if has_only_started else run.store):
            if not file.is_file():
                raise RunError(f"{path} is not a run, it has no {file.name}: {advice}")
        return run

    @classmethod
    def open_training_run(cls, path: Path) -> Self:
        """Open the directory of a run of `esper train`."""
        run = cls.open(path, f"give the directory of a run of `{cls.command}`")
        if run.is_grown():
            use = _USE.format(run=shlex.quote(str(path)))
            raise RunError(f"{path} is a run of `{GROWER}`, and not of `{cls.command}`: {use}")
        if run.is_played():
            raise RunError(f"{path} is a run of `esper evaluate`, which has no policy: give one of `{cls.command}`")
        return run

    def require_empty(self) -> None:
        """Refuse a directory with more than what a run that was killed at its start left behind."""
        for child in self.path.iterdir():
            is_empty_folder = child == self.checkpoints and all(file.name == LOCK_FILE for file in child.iterdir())
            is_lock = child == self.lock or child.name == LOCK_FILE
            if is_empty_folder or is_lock or child.name.endswith(TEMPORARY_SUFFIX):
                continue
            # If it contains a run, say what can be done with it.
            advice, quoted = "", shlex.quote(str(self.path))
            if self.config.is_file() and self.has_store:
                advice = f", or go on with `{self.command} --resume {quoted}`"
                if self.is_grown():
                    advice = f"; this is a run of `{GROWER}`: {_USE.format(run=quoted)}"
            raise RunError(f"{self.path} is not empty: choose a new directory{advice}")

    def is_grown(self) -> bool:
        """Whether the run is of a `Grower`; not if it was killed at its start."""
        return is_grower(self.read_metadata())

    def is_played(self) -> bool:
        """Whether the run is of `esper evaluate`, whose controller only plays and has no policy to go on with."""
        return self.read_metadata().get("command") == PLAYED

    def read_metadata(self) -> dict[str, Any]:
        """The metadata of the run's store; empty if the run was killed before it had one."""
        if not self.has_store:
            return {}
        with RunReader.open(self.store) as reader:
            return reader.metadata()

    def locked(self, what: str) -> AbstractContextManager[None]:
        """Lock the run for writing; `what` is the running command, for others' messages."""
        return hold_lock(self.lock, what)

    def open_store(self) -> RunStore:
        """Open the store for writing; create it if the run was killed before it had one."""
        return RunStore.open(self.store) if self.has_store else RunStore.create(self.store)

    @property
    def has_store(self) -> bool:
        """Whether there is a store. A run that was killed at its start may have none, or an empty file."""
        return self.store.is_file() and self.store.stat().st_size > 0


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """The run stopped or was killed before its end, and can be resumed."""
    FAILED = "failed"
    DAMAGED = "damaged"
    """The run's store cannot be read."""


OBJECTIVE = RunMetric("J")
"""The metric of training runs, whose scalar is ``objective``."""
_LIFE_EVENTS = (RunStarted, RunResumed, RunInterrupted, RunFailed, RunEnded)
"""Events that begin or end a process of a run."""
_END_STATES = {RunEnded.name: RunState.FINISHED, RunFailed.name: RunState.FAILED}


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come, and how good its results are."""

    command: str
    state: RunState
    done: int = 0
    """Number of iterations done, or of decisions of a `Grower`."""
    total: int | None = None
    metric: RunMetric = OBJECTIVE
    """What measures the run: J in training runs, the metric of growth in runs of a `Grower`."""
    value: float | None = None
    """The metric's newest value, on validation data."""
    probe_score: float | None = None
    """Mean test score of the greedy policy at its last measurement."""
    started: float | None = None
    """Seconds since 1970."""


def read_progress(run: RunDirectory, reader: RunReader) -> RunProgress:
    """A run's progress, from its store and its lock."""
    metadata, done = reader.metadata(), reader.last_iteration()
    total, started = metadata.get("iterations"), reader.newest(RunStarted.name)
    metric, scalar = progress_metric(metadata)
    value = next(reversed(reader.series(scalar, done - 1)), None)
    probe = next(reversed(reader.series("probe_score")), None)
    return RunProgress(
        command=str(metadata.get("command", "?")),
        state=read_state(run, reader),
        done=done,
        total=total if isinstance(total, int) else None,
        metric=metric,
        value=value and value[1],
        probe_score=probe and probe[1],
        started=started[0].time if started else None,
    )


def is_grower(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("command") == "grow"


def progress_metric(metadata: Mapping[str, Any]) -> tuple[RunMetric, str]:
    """The metric that measures a run, and the name of the scalar that holds its values."""
    if not is_grower(metadata):
        return OBJECTIVE, "objective"
    metric = RunMetric.from_metadata(metadata)
    return metric, metric.scalar


def read_state(run: RunDirectory, reader: RunReader) -> RunState:
    newest = reader.last_emitted([event_type.name for event_type in _LIFE_EVENTS])
    end_state = _END_STATES.get(newest.type) if newest else None
    # A finished run may be locked by other commands that use it, such as `esper evaluate`.
    if end_state is RunState.FINISHED:
        return end_state
    return RunState.RUNNING if is_locked(run.lock) else end_state or RunState.INTERRUPTED


@dataclass(frozen=True, slots=True)
class ListedRun:
    path: Path
    progress: RunProgress
    size: int
    """Total size of the run's files, in bytes."""
    failure: str | None = None
    """Why the run's store cannot be read; None if it can."""


def list_runs(folder: Path) -> list[ListedRun]:
    """The runs directly inside a folder, newest first."""
    try:
        runs = [RunDirectory(path) for path in sorted(folder.iterdir())]
        runs = [run for run in runs if run.config.is_file() and (run.store.is_file() or run.lock.is_file())]
    except OSError as error:
        raise RunError(f"cannot list {folder} ({error.strerror}): give a folder that has runs in it") from error
    return sorted(map(_list_run, runs), key=lambda run: run.progress.started or 0.0, reverse=True)


def _list_run(run: RunDirectory) -> ListedRun:
    size = 0
    for file in run.path.rglob("*"):
        with suppress(OSError):  # it was deleted meanwhile
            size += file.stat().st_size if file.is_file() and not file.is_symlink() else 0
    if not run.store.is_file():
        state = RunState.RUNNING if is_locked(run.lock) else RunState.INTERRUPTED
        return ListedRun(run.path, RunProgress("?", state), size)
    try:
        with RunReader.open(run.store) as reader:
            return ListedRun(run.path, read_progress(run, reader), size)
    except RunError as error:
        return ListedRun(run.path, RunProgress("?", RunState.DAMAGED), size, str(error))
