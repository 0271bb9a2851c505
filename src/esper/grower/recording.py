"""The store of one grower's decisions: `Recording` says what it keeps, `OwnRun` is the run directory that a grower
writes in its owner's loop, for `esper dash`, `watch`, `report` and the others.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

import yaml

from esper import __version__
from esper.errors import RunError
from esper.files import write_atomically
from esper.grower.decision import Change, Decision
from esper.growth.model import GrowingModel
from esper.lifecycle.gates import GATES, Reason, Verdicts
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.lifecycle.transitions import Cause
from esper.settings import Settings
from esper.telemetry.events import (
    Event,
    GateJudged,
    LifecycleTransition,
    Place,
    RolledBack,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
    StepTaken,
)
from esper.telemetry.metric import SCORE, Metric
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import GROWER, RunDirectory
from esper.telemetry.store import RunStore
from esper.training.governor.model import Rollback

_ADDED = "added_parameters"
"""Scalar: parameters of all seeds in the model."""
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
        self._store: RunStore | None = None
        self._recording: Recording | None = None
        self._began, self._ended, self._released = 0.0, False, False
        self.id: str | None = None
        """None before it is opened."""

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
        assert self._store is not None
        number = account.decision.number
        if self._ended:
            self._begin(number - 1)
        self._recording.keep(account)
        if account.decision.finished or number == self._terms["horizon"]:
            self._end(number)

    def keep_ending(self, done: int, changes: Sequence[Change], contributions: Mapping[str, float]) -> None:
        """As `Recording.keep_ending`; the run has ended, until there is another decision."""
        if self._recording is None and not changes:
            return
        self.require_open()
        assert self._recording is not None
        self._recording.keep_ending(done, changes, contributions)
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
            self._directory.require_new()
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
            self._store = self._held.enter_context(self._directory.open_store())
            self._recording = Recording(self._store, self._model, self._blueprints, float(self._terms["rent"]))
            _written[self.path] = self
        self._begin(done)
        write_atomically(self._directory.config, yaml.safe_dump(dict(self._terms), sort_keys=False))

    def _begin(self, done: int) -> None:
        assert self._recording is not None
        self._recording.begin(done, int(self._terms["seed"]), self._describe_run())
        self._began, self._ended = time.perf_counter(), False

    def _end(self, done: int) -> None:
        assert self._store is not None
        self._store.emit(RunEnded(iteration=done, seconds=time.perf_counter() - self._began))
        self._store.flush()
        self._ended = True

    def release(self) -> None:
        """Let go of the folder, for good."""
        self._store = self._recording = None
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


COMMAND = "grow"
"""What metadata call the runs of models that grow alone."""
_EPISODE, _ENVIRONMENT = 1, 0
"""There is but one of each."""
_Verdict = tuple[str, str]
"""A gate and its reason."""


@dataclass(frozen=True)
class Account:
    """A decision with what it was made on, and how the slots stood around it."""

    decision: Decision
    train_loss: float
    train_accuracy: float | None
    """None: not known."""
    value_before: float
    """What growth is about, as it was measured, before the rollback, if there was one; NaN: not measured."""
    verdicts: Verdicts
    """What the gates say that are ahead of the slots ``[1, S]`` when the decision was made."""
    before: SeedTable
    after: SeedTable
    about: Metric | None
    """What growth is about; None: not known yet."""


class Recording:
    """Writes what a grower does into a run store.

    Args:
        store: Open for writing.
        model: The one that grows.
        blueprints: Names of all that may grow, as the grower counts them.
        rent: What growth costs, as in ``score - rent * log1p(added / host parameters)``.
    """

    def __init__(self, store: RunStore, model: GrowingModel, blueprints: Sequence[str], rent: float) -> None:
        self._store = store
        self._model = model
        self._slots = list(model.slots)
        self._blueprints = list(blueprints)
        self._rent = rent
        self._judged: list[_Verdict | None] = [None] * len(self._slots)
        self._about: Metric | None = None

    def begin(self, done: int, seed: int, described: Mapping[str, Any]) -> None:
        """Begin the run, or go on with it after so many decisions: what it told of later ones is forgotten.

        Args:
            done: Decisions that were taken before.
            seed: All that is random follows from it.
            described: What the metadata say besides, by key.
        """
        store, model = self._store, self._model
        store.rewind(done)
        store.set_metadata(
            {
                "command": COMMAND,
                "seed": seed,
                "environments": 1,
                "slots": self._slots,
                "blueprints": self._blueprints,
                "host_parameters": model.host_parameters,
                **described,
            }
        )
        anew = not done and not store.newest(RunStarted.name)
        store.emit(
            RunStarted(iteration=0, esper_version=__version__, seed=seed)
            if anew
            else RunResumed(iteration=done, esper_version=__version__)
        )
        store.flush()
        self._judged = self._read_last_verdicts(done)

    def keep(self, account: Account) -> None:
        """Keep a decision, durably."""
        decision, store = account.decision, self._store
        if account.about is not None and account.about != self._about:  # known only when it is first measured
            store.set_metadata(account.about.metadata())
            self._about = account.about
        store.scalars(decision.number, self._list_scalars(account))
        for event in self._list_events(account):
            store.emit(event)
        store.flush()

    def keep_ending(self, done: int, changes: Sequence[Change], contributions: Mapping[str, float]) -> None:
        """What became of unfinished seeds after so many decisions, when growth ended; contributions by slot.

        It is kept once, whoever was killed after that and goes on from before.
        """
        known = self._store.events(LifecycleTransition)
        if any(event.cause == Cause.FINISH.name.lower() and event.iteration == done for event in known):
            return
        for change in changes:
            self._store.emit(self._describe_change(done, change, contributions))
        if changes:
            self._store.scalars(done, {_ADDED: self._count_added()})
        self._store.flush()

    def keep_failure(self, done: int, error: Exception) -> None:
        """The run stops after so many decisions."""
        self._store.emit(RunFailed(iteration=done, reason=str(error)))
        self._store.flush()

    def _list_events(self, account: Account) -> Iterator[Event]:
        rollback = account.decision.rollback
        if rollback is not None:
            yield self._describe_rollback(account, rollback)
        yield from self._list_judgements(account)
        for change in account.decision.changes:
            yield self._describe_change(account.decision.number, change, account.decision.contributions)
        yield self._describe_step(account)

    def _list_scalars(self, account: Account) -> dict[str, float]:
        """By scalar: what growth is about under its own name, and the score where that is another figure."""
        decision, about = account.decision, account.about
        measured: dict[str, float | None] = {}
        if about is not None:
            measured = {about.train_scalar: account.train_accuracy, about.scalar: decision.value}
            measured |= {} if about.higher_is_better else {SCORE: decision.score}
        return {
            **{name: value for name, value in measured.items() if value is not None and not math.isnan(value)},
            "train_loss": account.train_loss,
            "validation_loss": decision.loss,
            _ADDED: self._count_added(),
            **{f"contribution/{slot}": value for slot, value in account.decision.contributions.items()},
        }

    def _list_judgements(self, account: Account) -> Iterator[Event]:
        """Gates that say something else than before, or that others stood in the place of."""
        stages, reasons = account.before.stage[0], account.verdicts.reason[0]
        for slot, (stage, number) in enumerate(zip(stages.tolist(), reasons.tolist(), strict=True)):
            reason = Reason(number)
            verdict = None if reason is Reason.NO_GATE else (GATES[Stage(stage)], reason.name.lower())
            if verdict is not None and verdict != self._judged[slot]:
                yield GateJudged(
                    **_place(account.decision.number),
                    slot=slot,
                    gate=verdict[0],
                    passed=reason is Reason.PASSED,
                    reason=verdict[1],
                )
            self._judged[slot] = verdict

    def _read_last_verdicts(self, done: int) -> list[_Verdict | None]:
        """What the gates said when the last decision was made: their newest words, where they still stood there."""
        found: list[_Verdict | None] = [None] * len(self._slots)
        before = [step.stages for step in self._store.events(StepTaken) if step.iteration == done - 1]
        for event in self._store.events(GateJudged) if before else ():
            stage = Stage[before[0][event.slot].upper()]
            found[event.slot] = (event.gate, event.reason) if GATES.get(stage) == event.gate else None
        return found

    def _describe_step(self, account: Account) -> Event:
        decision, table = account.decision, account.after
        residents = cast("list[int]", table.blueprint[0].tolist())
        added = self._count_added() / self._model.host_parameters
        return StepTaken(
            **_place(decision.number),
            op=decision.op.name.lower(),
            slot=None if decision.slot is None else self._slots.index(decision.slot),
            blueprint=decision.blueprint,
            train_loss=account.train_loss,
            loss=account.decision.loss,
            metric=account.decision.value,
            objective=account.decision.score - self._rent * math.log1p(added),
            added=added,
            stages=tuple(Stage(stage).name.lower() for stage in table.stage[0]),
            blueprints=tuple(None if index < 0 else self._blueprints[index] for index in residents),
            alphas=tuple(table.alpha[0].tolist()),
            contributions=tuple(decision.contributions.get(slot) for slot in self._slots),
        )

    def _describe_change(self, number: int, change: Change, contributions: Mapping[str, float]) -> Event:
        return LifecycleTransition(
            **_place(number),
            slot=self._slots.index(change.slot),
            before=change.before.name.lower(),
            after=change.after.name.lower(),
            blueprint=change.blueprint,
            cause=change.cause.name.lower(),
            reason=change.reason.name.lower(),
            contribution=contributions.get(change.slot),
        )

    def _describe_rollback(self, account: Account, rollback: Rollback) -> Event:
        return RolledBack(
            **_place(account.decision.number),
            trouble=rollback.trouble.name.lower(),
            loss_before=rollback.loss,
            metric_before=account.value_before,
            loss_after=rollback.loss_restored,
            metric_after=account.decision.value,
            pruned=tuple(self._slots.index(name) for name in rollback.pruned),
            ended=False,
        )

    def _count_added(self) -> int:
        """Parameters of all seeds there are."""
        return sum(parameter.numel() for seed in self._model.seeds.values() for parameter in seed.parameters())


def _place(number: int) -> Place:
    """The first fields of a `NetworkEvent` of the decision with that number."""
    return Place(iteration=number, episode=_EPISODE, environment=_ENVIRONMENT, step=number - 1)
