"""What the store of a run keeps of a grower's decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from esper import __version__
from esper.grower.decision import Change, Decision, Ending
from esper.growth.model import GrowingModel
from esper.lifecycle.rules import GATES, Reason, Verdicts
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.lifecycle.transitions import Cause
from esper.population.governor.model import Rollback
from esper.runs.events import (
    Event,
    GateJudged,
    LifecycleTransition,
    NetworkStep,
    RolledBack,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
    StepTaken,
)
from esper.runs.metric import SCORE, Metric
from esper.runs.store import RunStore

_ADDED = "added_parameters"
"""Scalar: parameters of all seeds in the model."""
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
    """Accuracy in training; None where it is not known."""
    value_before: float
    """What growth is about, as it was measured, before the rollback, if there was one; NaN: not measured."""
    verdicts: Verdicts
    """What the gates say that are ahead of the slots ``[1, S]`` when the decision was made."""
    before: SeedTable
    after: SeedTable
    about: Metric | None
    """What growth is about; None: not known yet."""
    rent: float
    """What all seeds together cost after it, in units of the score."""

    def __str__(self) -> str:
        """``decision 7: germinate mlp in layer2; loss 0.4123 (training 0.3987), accuracy 0.873; layer2 +0.012``."""
        decision = self.decision
        loss = f"loss {decision.loss:.4g} (training {self.train_loss:.4g}){decision.measured}"
        earned = ", ".join(f"{slot} {value:+.3g}" for slot, value in decision.contributions.items())
        return "; ".join(filter(None, [f"decision {decision.number}: {decision.what}", loss, earned]))


class Recording:
    """Writes what a grower does into a run store, which somebody else has opened, and ends.

    Args:
        store: Open for writing.
        model: The one that grows.
        blueprints: Names of all that may grow, as the grower counts them.
    """

    def __init__(self, store: RunStore, model: GrowingModel, blueprints: Sequence[str]) -> None:
        self._store = store
        self._model = model
        self._slots = list(model.slots)
        self._blueprints = list(blueprints)
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
        store.record_scalars(decision.number, self._list_scalars(account))
        for event in self._list_events(account):
            store.emit(event)
        store.flush()

    def keep_ending(self, done: int, ending: Ending) -> None:
        """What became of unfinished seeds after so many decisions, when growth ended.

        It is kept once, whoever was killed after that and goes on from before.
        """
        transitions = self._store.events(LifecycleTransition)
        if any(event.cause == Cause.FINISH.name.lower() and event.iteration == done for event in transitions):
            return
        for change in ending.changes:
            self._store.emit(self._describe_change(done, change, ending.contributions))
        if ending.changes:
            self._store.record_scalars(done, {_ADDED: self._model.added_parameters})
        self._store.flush()

    def keep_failure(self, done: int, error: Exception) -> None:
        """The run stops after so many decisions."""
        self._store.emit(RunFailed(iteration=done, reason=str(error)))
        self._store.flush()

    def keep_end(self, done: int, seconds: float) -> None:
        """The run has ended after so many decisions, and took so long."""
        self._store.emit(RunEnded(iteration=done, seconds=seconds))
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
            _ADDED: self._model.added_parameters,
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
        verdicts: list[_Verdict | None] = [None] * len(self._slots)
        before = [step.stages for step in self._store.events(StepTaken) if step.iteration == done - 1]
        for event in self._store.events(GateJudged) if before else ():
            stage = Stage[before[0][event.slot].upper()]
            verdicts[event.slot] = (event.gate, event.reason) if GATES.get(stage) == event.gate else None
        return verdicts

    def _describe_step(self, account: Account) -> Event:
        decision, table = account.decision, account.after
        residents = cast("list[int]", table.blueprint[0].tolist())
        added = self._model.added_parameters / self._model.host_parameters
        return StepTaken(
            **_place(decision.number),
            op=decision.op.name.lower(),
            slot=None if decision.slot is None else self._slots.index(decision.slot),
            blueprint=decision.blueprint,
            train_loss=account.train_loss,
            loss=account.decision.loss,
            metric=account.decision.value,
            objective=account.decision.score - account.rent,
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


def _place(number: int) -> NetworkStep:
    """The first fields of a `NetworkEvent` of the decision with that number."""
    return NetworkStep(iteration=number, episode=_EPISODE, environment=_ENVIRONMENT, step=number - 1)
