"""Records E episodes: a log, which evaluations and iterations read, and the events of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
from torch import Tensor

from esper.control.learned import name_features
from esper.control.policy import PolicyStep
from esper.engine.observation import Observation
from esper.engine.recorder import DecisionRecorder
from esper.errors import RunError
from esper.lifecycle.actions import RELEVANT, Head, Op, describe_choices, make_wait_actions
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Bools, Floats, Ints
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import OUTCOME, name_rewards
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    InteractionsMeasured,
    LifecycleTransition,
    ModulePair,
    ModuleValue,
    NetworkStep,
    PolicyLooked,
    RolledBack,
    decode_event,
    encode_event,
)
from esper.runs.reader import ACCURACY, LOSS_REDUCTION
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.results import SeedShapley
from esper.train.settings import TrainSettings

_DECIMALS = 5
"""Number of decimals kept of measured figures, far below their noise."""
_ARRAYS = {
    "steps": np.int64,
    "running": np.bool_,
    "measured": np.float64,
    "objective": np.float64,
    "added": np.float64,
    "kept": np.bool_,
}
"""Types of a log's arrays."""


class EpisodeLog:
    """What was done and measured in E episodes, and the events of their slots; filled step by step."""

    def __init__(self, suite: Suite, instances: Sequence[Instance]) -> None:
        self.suite = suite.name
        self.instances = list(instances)
        self.changes: list[LifecycleTransition] = []
        self.rollbacks: list[RolledBack] = []
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

    def select_rows(self, rows: slice) -> EpisodeLog:
        """The finished log of some of the episodes, numbered from 0."""
        part = copy.copy(self)
        part.instances = self.instances[rows]
        part.changes, part.rollbacks = _select_events(self.changes, rows), _select_events(self.rollbacks, rows)
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
        """Everything that was recorded, as JSON values, except the instances."""
        return {
            "suite": self.suite,
            "events": [[event.name, event.version, encode_event(event)] for event in (*self.changes, *self.rollbacks)],
            **{name: np.array(getattr(self, name)).tolist() for name in _ARRAYS},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], suite: Suite, instances: Sequence[Instance]) -> EpisodeLog:
        """Inverse of `to_json`."""
        log = cls(suite, instances)
        if set(record) != {"suite", "events", *_ARRAYS}:  # of another version
            raise ValueError(f"not the record of a log: {sorted(record)}")
        try:
            events = [decode_event(*event) for event in record["events"]]
        except RunError as error:  # likewise
            raise ValueError(str(error)) from error
        log.changes = [event for event in events if isinstance(event, LifecycleTransition)]
        log.rollbacks = [event for event in events if isinstance(event, RolledBack)]
        for name, kind in _ARRAYS.items():
            array = np.array(record[name], kind)
            setattr(log, name, list(array) if isinstance(getattr(log, name), list) else array)
        return log


RowEvent = TypeVar("RowEvent", LifecycleTransition, RolledBack)


def _select_events(events: Sequence[RowEvent], rows: slice) -> list[RowEvent]:
    return [
        replace(event, environment=event.environment - rows.start)
        for event in events
        if rows.start <= event.environment < rows.stop
    ]


def stack_actions(logs: Sequence[EpisodeLog]) -> Ints:
    """The actions of several cohorts as one array ``[T, N, 8]``; shorter cohorts are filled up with waiting."""
    # Cohorts of a suite stop when all their episodes have ended, so their logs differ in length.
    longest = max(len(log.steps) for log in logs)
    padded = [
        np.stack(log.steps + [make_wait_actions(len(log.instances))] * (longest - len(log.steps))) for log in logs
    ]
    return np.concatenate(padded, axis=1)


class EpisodeRecorder:
    """Records E episodes from their first step to their end.

    Args:
        episodes: What is recorded.
        iteration: Of a training run, in which the episodes are played.
        events: Which events are made: ``log``, only those that the log keeps; ``changes``, also gates and the starts
            and ends of episodes; ``steps``, also every decision.
        rewards: Names of the rewards, one per network; empty: all have the outcome reward.
        first_environment: Number of the first network in the run.
        watched: Numbers of the environments whose policy's observations are recorded, too.
    """

    def __init__(
        self,
        episodes: Episodes,
        iteration: int = 0,
        *,
        events: Literal["log", "changes", "steps"] = "log",
        rewards: Sequence[str] = (),
        first_environment: int = 0,
        watched: Collection[int] = (),
    ) -> None:
        self.log = EpisodeLog(episodes.suite, episodes.instances)
        self.events = events
        self._episodes, self._iteration, self._first_environment = episodes, iteration, first_environment
        self._rewards = rewards or name_rewards([OUTCOME]) * episodes.size
        # Watched environments of other shards are recorded there.
        rows = [number - first_environment for number in watched]
        self._watched_rows = [row for row in rows if 0 <= row < episodes.size]
        self._decisions = DecisionRecorder(episodes.engine, episodes.suite.blueprints, self._place, _DECIMALS)
        self._paid = np.zeros(episodes.size)

    def _place(self, row: int) -> NetworkStep:
        return NetworkStep(
            iteration=self._iteration,
            episode=self._iteration,
            environment=self._first_environment + row,
            step=len(self.log.steps),
        )

    def record_start(self) -> Iterator[Event]:
        """The events of the episodes' start; none for the log alone."""
        if self.events == "log":
            return
        parameters = self._episodes.population.host_parameters.tolist()
        for row, instance in enumerate(self._episodes.instances):
            yield EpisodeStarted(
                **self._place(row),
                instance=instance.name,
                family=instance.family,
                variant=instance.variant,
                rent=instance.rent,
                learning_rate=instance.learning_rate,
                train_size=instance.train_size,
                widths=instance.widths,
                host_parameters=parameters[row],
                reward=self._rewards[row],
            )

    def record_observation(self, observation: Observation, step: PolicyStep) -> Iterator[Event]:
        """The events with the policy's observations before a decision and its probabilities, for watched networks."""
        for row in self._watched_rows:
            if self._episodes.finished[row]:
                continue
            # Only the heads that the operation uses have decided anything.
            relevant = RELEVANT[int(step.actions[row, Head.OP])]
            yield PolicyLooked(
                **self._place(row),
                globals=self._to_tuples(observation.globals[row]),
                slots=self._to_tuples(observation.slots[row]),
                blueprints=self._to_tuples(observation.blueprints[row]),
                probabilities={
                    head.name.lower(): self._to_tuples(step.head_log_probs[head][row].exp())
                    for head in Head
                    if relevant[head]
                },
            )

    def record_step(self, actions: Ints, result: StepResult, policy: PolicyStep | None = None) -> Iterable[Event]:
        """Add one step of all episodes to the log; returns the events of the decision and of what followed.

        ``policy`` is None if a rule decided.
        """
        running, decisions, events = result.running, self._decisions, list[Event]()
        changes = list(decisions.record_transitions(result.transitions, running))
        rollbacks = list(decisions.record_rollbacks())
        if self.events != "log":
            self._paid += result.reward
            steps = self._record_steps(result, policy) if self.events == "steps" else ()
            events = [*decisions.record_gates(running), *changes, *steps, *rollbacks, *self._record_ends(result)]

        log = self.log
        # The log counts its episodes from 0, a run those of all shards together.
        rows = slice(self._first_environment, self._first_environment + self._episodes.size)
        log.changes += _select_events(changes, rows)
        log.rollbacks += _select_events(rollbacks, rows)
        log.steps.append(actions)
        log.running.append(running)
        log.measured.append(result.evaluation.accuracy)
        return events

    def _record_steps(self, result: StepResult, policy: PolicyStep | None) -> Iterator[Event]:
        """The decisions, with what only a population knows: rewards, J, and the policy's estimates."""
        population, decisions = self._episodes.population, self._decisions
        added = population.count_seed_parameters(population.table.blended) / population.host_parameters
        terms = {name: decisions.round(term) for name, term in result.terms.items()}
        estimates: dict[str, list[Any]] = {}
        if policy is not None:
            estimates = {
                "value": decisions.round(policy.value.cpu().numpy()),
                "log_prob": decisions.round(policy.log_prob.cpu().numpy()),
            }
        yield from decisions.record_steps(
            result.running.nonzero()[0].tolist(),
            choices=[describe_choices(action) for action in self._episodes.engine.applied.actions.tolist()],
            objective=decisions.round(result.potential),
            added=decisions.round(added),
            reward=decisions.round(result.reward),
            terms=[
                {name: term[row] for name, term in terms.items() if term[row]} for row in range(self._episodes.size)
            ],
            **estimates,
        )

    def _record_ends(self, result: StepResult) -> Iterator[Event]:
        """Episodes that ended with this step, with their committed modules."""
        ended = (result.running & result.finished).nonzero()[0].tolist()
        if not ended:
            return
        population, blueprints = self._episodes.population, self._episodes.suite.blueprints
        table = population.table
        kept = table.stage == Stage.FOSSILIZED
        committed = population.count_seed_parameters(kept) / population.host_parameters
        for row in ended:
            indices: list[int] = table.blueprint[row].tolist()
            yield EpisodeEnded(
                **self._place(row),
                objective=float(result.potential[row]),
                accuracy=float(result.reward_inputs.after.score["accuracy"][row]),
                added=float(committed[row]),
                paid=float(self._paid[row]),
                kept=tuple(
                    blueprints[index] if fossil else None for index, fossil in zip(indices, kept[row], strict=True)
                ),
            )

    def finish(self) -> EpisodeLog:
        """Add to the log how the episodes ended."""
        population, log = self._episodes.population, self.log
        log.kept = population.table.stage == Stage.FOSSILIZED
        log.objective = self._episodes.potential
        log.added = population.count_seed_parameters(log.kept) / population.host_parameters
        return log

    def _to_tuples(self, values: Tensor | list[Any]) -> tuple[Any, ...]:
        """The rounded values of a tensor, as nested tuples."""
        rows = self._decisions.round(values.cpu().numpy()) if isinstance(values, Tensor) else values
        return tuple(self._to_tuples(cast("list[Any]", row)) if isinstance(row, list) else row for row in rows)


def record_interactions(iteration: int, suite: Suite, networks: Sequence[SeedShapley]) -> list[InteractionsMeasured]:
    """The events with the values of kept modules in ``networks`` of the suite, which were probed in an iteration."""
    return [
        InteractionsMeasured(
            iteration=iteration,
            instance=network.instance,
            family=network.family,
            metric=ACCURACY if suite.objective == "accuracy" else LOSS_REDUCTION.metric,
            modules=tuple(
                ModuleValue(
                    slot=seed.slot,
                    blueprint=seed.blueprint,
                    value=round(seed.value, _DECIMALS) if math.isfinite(seed.value) else None,
                )
                for seed in network.seeds
            ),
            pairs=tuple(
                ModulePair(first=pair.first, second=pair.second, interaction=round(pair.interaction, _DECIMALS))
                for pair in network.pairs
            ),
            # Estimates have a standard error, or an error that is unknown.
            exact=all(seed.standard_error == 0 for seed in network.seeds),
        )
        for network in networks
    ]


def describe_run(settings: TrainSettings) -> dict[str, Any]:
    """The metadata of a training run, by key."""
    suite = get_suite(settings.suite)
    return {
        "command": "train",
        "seed": settings.seed,
        "environments": settings.environments,
        "iterations": settings.iterations,
        "features": name_features(settings.policy, settings.promise),
        **describe_suite(suite),
        **(asdict(LOSS_REDUCTION) if suite.objective == "loss" and not settings.mix else {}),
    }


def describe_suite(suite: Suite) -> dict[str, Any]:
    """The metadata of a run on a suite that readers need; numbers in events are indices into its lists."""
    return {
        "suite": suite.name,
        "steps": suite.steps,
        "slots": list(suite.slot_names),
        "blueprints": list(suite.blueprints),
        "operations": [op.name.lower() for op in Op],
        "heads": [head.name.lower() for head in Head],
    }
