"""The log of E episodes, their actions, changes of stage and rollbacks, and its form on disk."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.rules import Reason
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.numerics.arrays import Bools, Floats, Ints
from esper.rl.episodes import Episodes, NetworkRollback, StepResult
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite


@dataclass(frozen=True)
class StageChange:
    """A slot's change of stage, by names; ``step`` counts decisions from 0."""

    environment: int
    step: int
    slot: int
    before: str
    after: str
    blueprint: str | None
    cause: str
    reason: str


@dataclass(frozen=True)
class RecordedRollback(NetworkRollback):
    """A rollback by the governor."""

    step: int
    """Decisions are counted from 0."""


class EpisodeLog:
    """Actions, stage changes, rollbacks and objectives of E episodes, filled step by step."""

    def __init__(self, suite: Suite, instances: Sequence[Instance]) -> None:
        self.suite = suite.name
        self._blueprints = suite.blueprints
        self.instances = list(instances)
        self.changes: list[StageChange] = []
        self.rollbacks: list[RecordedRollback] = []
        self.steps: list[Ints] = []
        """Actions per step, each ``[E, 8]``."""
        self.running: list[Bools] = []
        """Whose episode had not ended before the step, each ``[E]``."""
        self.measured: list[Floats] = []
        """Validation accuracies per step, each ``[E]``."""
        self.objective: Floats = np.zeros(len(instances))
        """J of each committed network on validation data, ``[E]``."""
        self.added: Floats = np.zeros(len(instances))
        """Committed seeds' parameters over the host's, ``[E]``."""
        self.kept: Bools = np.zeros((len(instances), len(suite.sites)), np.bool_)
        """Which slots ended with a committed seed, ``[E, S]``."""

    def add(self, actions: Ints, result: StepResult) -> None:
        """One step of all episodes."""
        step = len(self.steps)
        self.steps.append(actions)
        self.running.append(result.running)
        self.measured.append(result.evaluation.accuracy)
        self.rollbacks += [RecordedRollback(step=step, **vars(incident)) for incident in result.rollbacks]
        changes = result.transitions
        for index in range(len(changes)):
            blueprint = int(changes.blueprint[index])
            self.changes.append(
                StageChange(
                    int(changes.env[index]),
                    step,
                    int(changes.slot[index]),
                    Stage(changes.before[index]).name.lower(),
                    Stage(changes.after[index]).name.lower(),
                    None if blueprint == NO_BLUEPRINT else self._blueprints[blueprint],
                    Cause(changes.cause[index]).name.lower(),
                    Reason(changes.reason[index]).name.lower(),
                )
            )

    def finish(self, episodes: Episodes) -> None:
        """Take down how the episodes ended."""
        population = episodes.population
        self.kept = population.table.stage == Stage.FOSSILIZED
        self.objective = episodes.potential
        self.added = population.count_seed_parameters(self.kept) / population.host_parameters

    def part(self, place: slice) -> EpisodeLog:
        """The finished log of some of the episodes alone, numbered from 0."""
        own = copy.copy(self)
        own.instances = self.instances[place]
        own.changes = _within(self.changes, place)
        own.rollbacks = _within(self.rollbacks, place)
        own.running = [running[place] for running in self.running]
        own.steps = [actions[place] for actions in self.steps]
        own.measured = [accuracies[place] for accuracies in self.measured]
        own.objective, own.added, own.kept = self.objective[place], self.added[place], self.kept[place]
        return own

    @property
    def actions(self) -> Ints:
        """``[T, E, 8]``."""
        return np.stack(self.steps)

    @property
    def accuracies(self) -> Floats:
        """Validation accuracy after each step, ``[T, E]``."""
        return np.stack(self.measured)

    def operation_shares(self) -> dict[str, float]:
        """The share of decisions that each operation had."""
        taken = self.actions[..., Head.OP][np.stack(self.running)]
        counts = np.bincount(taken, minlength=len(Op))
        return {op.name.lower(): float(counts[op] / counts.sum()) for op in Op}


def stack_actions(logs: Sequence[EpisodeLog]) -> Ints:
    """The actions of several cohorts as one ``[T, N, 8]``; those whose episodes all ended earlier then wait."""
    longest = max(len(log.steps) for log in logs)
    padded = [
        np.stack(log.steps + [make_wait_actions(len(log.instances))] * (longest - len(log.steps))) for log in logs
    ]
    return np.concatenate(padded, axis=1)


Numbered = TypeVar("Numbered", StageChange, RecordedRollback)


def _within(records: Sequence[Numbered], place: slice) -> list[Numbered]:
    """The records of some of the environments, numbered from 0."""
    return [
        replace(record, environment=record.environment - place.start)
        for record in records
        if place.start <= record.environment < place.stop
    ]


_RECORDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (StageChange, RecordedRollback)}
"""Dataclasses of plain values that a log may list."""


def log_to_json(log: EpisodeLog) -> dict[str, Any]:
    """All that was counted; not the suite and the instances, which whoever reads it back has to know."""
    return {name: _encode(value) for name, value in _list_fields(log).items()}


def log_from_json(record: Mapping[str, Any], suite: Suite, instances: Sequence[Instance]) -> EpisodeLog:
    """Inverse of :func:`log_to_json`.

    Raises:
        ValueError: what was counted then is not what is counted now.
    """
    log = EpisodeLog(suite, instances)
    if record.keys() != _list_fields(log).keys():
        raise ValueError(f"not the record of a log: {sorted(record)}")
    vars(log).update({name: _decode(value) for name, value in record.items()})
    return log


def _list_fields(log: EpisodeLog) -> dict[str, Any]:
    return {name: value for name, value in vars(log).items() if name != "instances" and not name.startswith("_")}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return {"dtype": array.dtype.str, "array": array.tolist()}
    if isinstance(value, list):
        return [_encode(one) for one in cast("list[Any]", value)]
    kind = type(value).__name__
    return {"kind": kind, "fields": asdict(value)} if kind in _RECORDS else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in cast("list[Any]", value)]
    match value:
        case {"dtype": dtype, "array": array}:
            return np.array(array, np.dtype(dtype))
        case {"kind": kind, "fields": fields}:
            return _RECORDS[kind](**{name: _freeze(one) for name, one in fields.items()})
        case _:
            return value


def _freeze(value: Any) -> Any:
    """JSON has no tuples, and records, being immutable, no lists."""
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
