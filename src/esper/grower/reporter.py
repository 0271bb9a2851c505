"""Who is told of decisions: standard output, and the run in which a grower keeps them."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

import yaml

from esper.config.settings import Settings
from esper.errors import RunError
from esper.files import write_atomically
from esper.grower.decision import Ending
from esper.grower.distributed import Processes
from esper.grower.recording import Account, Recording
from esper.growth.model import GrowingModel
from esper.runs.reader import RunReader
from esper.runs.run_directory import GROWER, RunDirectory


class Reporter:
    """Tells of one growth; of several processes the first one does.

    Args:
        processes: Those that the growth is in.
        own: The run that the grower writes by itself, if it writes one.
        verbose: Whether to print.
    """

    def __init__(self, processes: Processes, own: OwnRun | None, *, verbose: bool) -> None:
        self._processes, self._own, self._verbose = processes, own, verbose
        self.recording: Recording | OwnRun | None = own
        """Where decisions are kept, if anywhere."""
        self._in_own_run(OwnRun.open)

    @property
    def identity(self) -> str | None:
        """By which the grower's own run is known again, in the first process; None without one."""
        return None if self._own is None else self._own.id

    def require_open(self) -> None:
        """Refuse to go on where the grower's own run was closed.

        Raises:
            RunError: it was, or is another grower's.
        """
        self._in_own_run(OwnRun.require_open)

    def resume(self, decisions: int, identity: str | None) -> None:
        """Go on in the grower's own run after so many decisions."""
        self._in_own_run(lambda own: own.resume(decisions, identity))

    def close(self, decisions: int) -> None:
        """Training has ended after so many decisions."""
        self._in_own_run(lambda own: own.close(decisions))

    def tell(self, account: Account) -> None:
        """Report a decision."""
        self._print(str(account))
        self._record(lambda recording: recording.keep(account))

    def tell_ending(self, decisions: int, ending: Ending) -> None:
        """What became of unfinished seeds after so many decisions."""
        self._print(*ending.lines)
        self._record(lambda recording: recording.keep_ending(decisions, ending))

    def tell_failure(self, decisions: int, failure: Exception) -> None:
        """Why nothing goes on after so many decisions."""
        self._record(lambda recording: recording.keep_failure(decisions, failure))

    def _in_own_run(self, act: Callable[[OwnRun], None]) -> None:
        if (own := self._own) is not None:
            self._processes.agree(lambda: act(own))

    def _record(self, keep: Callable[[Recording | OwnRun], None]) -> None:
        if (recording := self.recording) is not None:
            self._processes.agree(lambda: keep(recording))

    def _print(self, *lines: str) -> None:
        if self._verbose and self._processes.first:
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()


_ID = "id"
"""Metadata by which a saved grower knows its run again."""
_SAME = ("slots", "blueprints")
"""Metadata in which a run must agree with whoever goes on with it."""

_written: WeakValueDictionary[Path, OwnRun] = WeakValueDictionary()
"""Runs that growers of this process write, by their folders."""


class OwnRun:
    """A run that begins where its folder is new, and goes on once the grower that wrote it is loaded.

    Args:
        path: The folder.
        model: The one that grows.
        blueprints: Names of all that may grow, as the grower counts them.
        told: What the grower was constructed with: with what can be said of the model it is the run's ``config.yaml``.

    Raises:
        RunError: the folder holds something else, is in use, or cannot be written.
    """

    def __init__(self, path: Path, model: GrowingModel, blueprints: Sequence[str], told: Mapping[str, Any]) -> None:
        self.path = path.resolve()
        self._directory = RunDirectory(self.path)
        self._model, self._blueprints = model, list(blueprints)
        plain = {n: v.model_dump(mode="json") if isinstance(v, Settings) else v for n, v in told.items()}
        self._terms: dict[str, Any] = {
            "host": type(model.host).__name__,
            "slots": {slot.name: list(slot.blueprints) for slot in model.slots.values()},
            **plain,
        }
        self._held = ExitStack()
        finalize(self, self._held.close)
        self._recording: Recording | None = None
        self._began, self._ended, self._released = 0.0, False, False
        self.id: str | None = None
        """The run's id; None before it is opened."""

    def open(self) -> None:
        """Begin the run, unless it has decisions already: then it waits for `resume`."""
        self.id, done = self._find_run()
        if not done:
            self._write(0)

    def resume(self, done: int, identity: str | None) -> None:
        """Go on after so many decisions, with a grower that was saved in the run ``identity``.

        Raises:
            RunError: this is another run, or one that has not come so far.
        """
        found, known = self._find_run()
        if known and identity != found:
            raise RunError(
                f"{self.path} holds another run than the one that this grower was saved in: give the folder of that "
                "one, or a new one"
            )
        if known and known < done:
            raise RunError(f"{self.path} ends after decision {known}, the grower's is {done}: give a new folder")
        self._write(done)

    def require_open(self) -> None:
        """RunError if it is not this grower's to write."""
        if self._recording is not None:
            return
        if self._released:
            raise RunError(f"this grower no longer writes {self.path}: it was closed, or another one goes on with it")
        raise RunError(
            f"{self.path} holds a run already: go on with it by load_state_dict of a grower that was saved in it, or "
            "give a new folder"
        )

    def keep(self, account: Account) -> None:
        """Keep a decision, durably; with the last one that is planned the run has ended, until there is another."""
        assert self._recording is not None
        number = account.decision.number
        if self._ended:
            self._begin(number - 1)
        self._recording.keep(account)
        if account.decision.finished or number == self._terms["horizon"]:
            self._end(number)

    def keep_ending(self, done: int, ending: Ending) -> None:
        """As `Recording.keep_ending`; the run has ended, until there is another decision."""
        if self._recording is None and not ending.changes:
            return
        self.require_open()
        assert self._recording is not None
        self._recording.keep_ending(done, ending)
        if not self._ended:
            self._end(done)

    def keep_failure(self, done: int, error: Exception) -> None:
        """The run stops after so many decisions."""
        assert self._recording is not None
        self._recording.keep_failure(done, error)

    def close(self, done: int) -> None:
        """Nothing more comes after so many decisions; the folder is free for others."""
        if self._recording is None:
            return
        if not self._ended:
            self._end(done)
        self.release()

    def _find_run(self) -> tuple[str, int]:
        """Name and decisions of the run in the folder, which is ours, or a new one's."""
        new = secrets.token_hex(8), 0
        store = self._directory.store
        if not store.is_file() or not store.stat().st_size:
            self._require_empty()
            return new
        with RunReader.open(store) as reader:
            metadata, done = reader.metadata(), reader.last_iteration()
        if not metadata:  # it was killed in its first moment
            return new
        described = self._describe_run()
        if _ID not in metadata:
            raise RunError(f"{self.path} holds a run that no `{GROWER}` wrote: give a new folder")
        for key in _SAME:
            if metadata.get(key) != described[key]:
                raise RunError(
                    f"{self.path} holds another run, with {key} {metadata.get(key)!r} instead of {described[key]!r}: "
                    "give a new folder"
                )
        return str(metadata[_ID]), done

    def _require_empty(self) -> None:
        if not self.path.exists():
            return
        try:
            self._directory.require_empty()
        except OSError as error:
            raise RunError(f"cannot write a run to {self.path} ({error.strerror}): give a new folder") from error
        except RunError:
            raise RunError(f"{self.path} is not empty and holds no run: give a new folder") from None

    def _write(self, done: int) -> None:
        """Take the folder for oneself, and begin."""
        if self._recording is None:
            holder = _written.get(self.path)
            if holder is not None:
                holder.release()
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"cannot make the folder {self.path} ({error.strerror}): give another") from error
            self._held.enter_context(self._directory.locked(GROWER))
            self.id, _ = self._find_run()  # whoever held it may have written
            store = self._held.enter_context(self._directory.open_store())
            self._recording = Recording(store, self._model, self._blueprints)
            _written[self.path] = self
        self._begin(done)
        write_atomically(self._directory.config, yaml.safe_dump(dict(self._terms), sort_keys=False))

    def _begin(self, done: int) -> None:
        assert self._recording is not None
        self._recording.begin(done, int(self._terms["seed"]), self._describe_run())
        self._began, self._ended = time.perf_counter(), False

    def _end(self, done: int) -> None:
        assert self._recording is not None
        self._recording.keep_end(done, time.perf_counter() - self._began)
        self._ended = True

    def release(self) -> None:
        """Let go of the folder, for good."""
        self._recording = None
        self._released = True
        self._held.close()
        _written.pop(self.path, None)

    def _describe_run(self) -> dict[str, Any]:
        """What the metadata say besides what `Recording` does."""
        terms, horizon = self._terms, self._terms["horizon"]
        planned = {} if horizon is None else {"iterations": horizon, "steps": horizon}
        return {
            _ID: self.id,
            **{name: terms[name] for name in ("host", "controller", "evidence")},
            "slots": list(self._model.slots),
            "blueprints": self._blueprints,
            **planned,
        }
