"""What happened in a set of episodes, for reports and statistics."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from esper.experiments.seed_gradients import SeedGradients, seed_gradients
from esper.lifecycle.actions import Head, Op, wait
from esper.lifecycle.gates import Reason
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause, Transitions
from esper.rl.episodes import Episodes, StepResult
from esper.rl.incidents import Incident
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite
from esper.training.gradients import HealthTable


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
class Rollback(Incident):
    """A rollback by the governor."""

    step: int
    """Decisions are counted from 0."""


class Tally:
    """Actions, stage changes, rollbacks, seeds' gradients and objectives of E episodes, filled step by step."""

    def __init__(self, suite: Suite, instances: Sequence[Instance]) -> None:
        self._blueprints = suite.blueprints
        self.instances = list(instances)
        self.changes: list[StageChange] = []
        self.rollbacks: list[Rollback] = []
        self.gradients: list[SeedGradients] = []
        """Of every seed that learned; known at the end."""
        self._transitions: list[Transitions] = []
        self._health: list[HealthTable] = []
        self.steps: list[NDArray[np.int64]] = []
        """Actions per step, each ``[E, 8]``."""
        self.running: list[NDArray[np.bool_]] = []
        """Whose episode had not ended before the step, each ``[E]``."""
        self.measured: list[NDArray[np.float64]] = []
        """Validation accuracies per step, each ``[E]``."""
        self.objective: NDArray[np.float64] = np.zeros(len(instances))
        """J of each committed network on validation data, ``[E]``."""
        self.added: NDArray[np.float64] = np.zeros(len(instances))
        """Committed seeds' parameters over the host's, ``[E]``."""
        self.kept: NDArray[np.bool_] = np.zeros((len(instances), len(suite.sites)), np.bool_)
        """Which slots ended with a committed seed, ``[E, S]``."""

    def add(self, actions: NDArray[np.int64], result: StepResult) -> None:
        """One step of all episodes."""
        step = len(self.steps)
        self.steps.append(actions)
        self.running.append(result.running)
        self.measured.append(result.evaluation.accuracy)
        self.rollbacks += [Rollback(step=step, **vars(incident)) for incident in result.incidents]
        self._health.append(result.training.health)
        changes = result.transitions
        self._transitions.append(changes)
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
        """Take down how the episodes ended, and what needs whole episodes."""
        self.gradients = seed_gradients(self._blueprints, self._transitions, self._health)
        self._transitions, self._health = [], []
        population = episodes.population
        self.kept = population.table.stage == Stage.FOSSILIZED
        self.objective = episodes.potential
        self.added = population.parameters_in(self.kept) / population.host_parameters

    def part(self, place: slice) -> Tally:
        """The finished tally of some of the episodes alone, numbered from 0."""
        own = copy.copy(self)
        own.instances = self.instances[place]
        own.changes = _within(self.changes, place)
        own.rollbacks = _within(self.rollbacks, place)
        own.gradients = _within(self.gradients, place)
        own.running = [running[place] for running in self.running]
        own.steps = [actions[place] for actions in self.steps]
        own.measured = [accuracies[place] for accuracies in self.measured]
        own.objective, own.added, own.kept = self.objective[place], self.added[place], self.kept[place]
        return own

    @property
    def actions(self) -> NDArray[np.int64]:
        """``[T, E, 8]``."""
        return np.stack(self.steps)

    @property
    def accuracies(self) -> NDArray[np.float64]:
        """Validation accuracy after each step, ``[T, E]``."""
        return np.stack(self.measured)

    def operation_shares(self) -> dict[str, float]:
        """The share of decisions that each operation had."""
        taken = self.actions[..., Head.OP][np.stack(self.running)]
        counts = np.bincount(taken, minlength=len(Op))
        return {op.name.lower(): float(counts[op] / counts.sum()) for op in Op}


def side_by_side(tallies: Sequence[Tally]) -> NDArray[np.int64]:
    """The actions of several cohorts as one ``[T, N, 8]``; those whose episodes all ended earlier then wait."""
    longest = max(len(tally.steps) for tally in tallies)
    padded = [np.stack(tally.steps + [wait(len(tally.instances))] * (longest - len(tally.steps))) for tally in tallies]
    return np.concatenate(padded, axis=1)


Numbered = TypeVar("Numbered", StageChange, Rollback, SeedGradients)


def _within(records: Sequence[Numbered], place: slice) -> list[Numbered]:
    """The records of some of the environments, numbered from 0."""
    return [
        replace(record, environment=record.environment - place.start)
        for record in records
        if place.start <= record.environment < place.stop
    ]
