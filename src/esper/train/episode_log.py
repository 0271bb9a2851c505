"""The log of E episodes: their actions, changes of stage and rollbacks, and its JSON form."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from esper.engine.recorder import StageChange, list_stage_changes
from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.stages import Stage
from esper.numerics.arrays import Bools, Floats, Ints
from esper.rl.episodes import Episodes, NetworkRollback, StepResult
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite


@dataclass(frozen=True)
class RecordedRollback(NetworkRollback):
    """A rollback by the governor; ``step`` counts decisions from 0."""

    step: int


class EpisodeLog:
    """Actions, stage changes, rollbacks and objectives of E episodes, filled step by step."""

    def __init__(self, suite: Suite, instances: Sequence[Instance]) -> None:
        self.suite = suite.name
        self._blueprints = suite.blueprints
        self.instances = list(instances)
        self.changes: list[StageChange] = []
        self.rollbacks: list[RecordedRollback] = []
        self.steps: list[Ints] = []
        """Actions of each step, ``[E, 8]``."""
        self.running: list[Bools] = []
        """Whether an episode was still running before each step, ``[E]``."""
        self.measured: list[Floats] = []
        """Validation accuracies after each step, ``[E]``."""
        self.objective: Floats = np.zeros(len(instances))
        """J of each committed network on validation data, ``[E]``."""
        self.added: Floats = np.zeros(len(instances))
        """Number of the committed seeds' parameters divided by the host's, ``[E]``."""
        self.kept: Bools = np.zeros((len(instances), len(suite.sites)), np.bool_)
        """Which slots ended with a committed seed, ``[E, S]``."""

    def add(self, actions: Ints, result: StepResult) -> None:
        """Record one step of all episodes."""
        # Arrays are kept for statistics; stage changes and rollbacks become records, for readers.
        step = len(self.steps)
        self.steps.append(actions)
        self.running.append(result.running)
        self.measured.append(result.evaluation.accuracy)
        self.rollbacks += [RecordedRollback(step=step, **vars(rollback)) for rollback in result.rollbacks]
        self.changes += list_stage_changes(result.transitions, step, self._blueprints)

    def finish(self, episodes: Episodes) -> None:
        """Record how the episodes ended."""
        population = episodes.population
        self.kept = population.table.stage == Stage.FOSSILIZED
        self.objective = episodes.potential
        self.added = population.count_seed_parameters(self.kept) / population.host_parameters

    def select_rows(self, rows: slice) -> EpisodeLog:
        """The finished log of some of the episodes, numbered from 0."""
        part = copy.copy(self)
        part.instances = self.instances[rows]
        part.changes = _select_records(self.changes, rows)
        part.rollbacks = _select_records(self.rollbacks, rows)
        part.running = [running[rows] for running in self.running]
        part.steps = [actions[rows] for actions in self.steps]
        part.measured = [accuracies[rows] for accuracies in self.measured]
        part.objective, part.added, part.kept = self.objective[rows], self.added[rows], self.kept[rows]
        return part

    @property
    def actions(self) -> Ints:
        """``[T, E, 8]``."""
        return np.stack(self.steps)

    @property
    def accuracies(self) -> Floats:
        """Validation accuracy after each step, ``[T, E]``."""
        return np.stack(self.measured)

    def compute_operation_shares(self) -> dict[str, float]:
        """The fraction of decisions for each operation, by name."""
        operations = self.actions[..., Head.OP][np.stack(self.running)]
        counts = np.bincount(operations, minlength=len(Op))
        return {op.name.lower(): float(counts[op] / counts.sum()) for op in Op}

    def to_json(self) -> dict[str, Any]:
        """Everything that was recorded, as JSON values, except the suite and the instances."""
        return {name: _encode(value) for name, value in self._recorded().items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], suite: Suite, instances: Sequence[Instance]) -> EpisodeLog:
        """Inverse of `to_json`."""
        # A log of another version has other fields.
        log = cls(suite, instances)
        if record.keys() != log._recorded().keys():
            raise ValueError(f"not the record of a log: {sorted(record)}")
        vars(log).update({name: _decode(value) for name, value in record.items()})
        return log

    def _recorded(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "instances" and not name.startswith("_")}


def stack_actions(logs: Sequence[EpisodeLog]) -> Ints:
    """The actions of several cohorts as one array ``[T, N, 8]``; shorter cohorts are filled up with waiting."""
    # Cohorts of a suite stop when all their episodes have ended, so their logs differ in length.
    longest = max(len(log.steps) for log in logs)
    padded = [
        np.stack(log.steps + [make_wait_actions(len(log.instances))] * (longest - len(log.steps))) for log in logs
    ]
    return np.concatenate(padded, axis=1)


Record = TypeVar("Record", StageChange, RecordedRollback)
_RECORDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (StageChange, RecordedRollback)}
"""Types of the records in a log, by name."""


def _select_records(records: Sequence[Record], rows: slice) -> list[Record]:
    return [
        replace(record, environment=record.environment - rows.start)
        for record in records
        if rows.start <= record.environment < rows.stop
    ]


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return {"dtype": array.dtype.str, "array": array.tolist()}
    if isinstance(value, list):
        return [_encode(item) for item in cast("list[Any]", value)]
    kind = type(value).__name__
    return {"kind": kind, "fields": asdict(value)} if kind in _RECORDS else value


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in cast("list[Any]", value)]
        case {"dtype": dtype, "array": array}:
            return np.array(array, np.dtype(dtype))
        case {"kind": kind, "fields": fields}:
            # JSON has no tuples, and records, being immutable, no lists.
            values = {
                name: tuple(cast("list[Any]", item)) if isinstance(item, list) else item
                for name, item in fields.items()
            }
            return _RECORDS[kind](**values)
        case _:
            return value
