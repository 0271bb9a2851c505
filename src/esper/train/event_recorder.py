"""Tells what happens to the networks of a population, step by step, as events of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.control.learned import name_features
from esper.control.policy import PolicyStep
from esper.engine.observation import Observation
from esper.lifecycle.actions import RELEVANT, Head, Op, describe_choices
from esper.lifecycle.rules import GATES, Reason
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.numerics.arrays import Ints
from esper.rl.episodes import Episodes, StepResult
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GateJudged,
    LifecycleTransition,
    NetworkStep,
    PolicyLooked,
    RolledBack,
    StepTaken,
)
from esper.runs.metric import LOSS_REDUCTION
from esper.tasks.registry import get_suite
from esper.train.settings import TrainSettings

_DECIMALS = 5
"""Kept of measured figures; far below their noise."""
_STAGES = tuple(stage.name.lower() for stage in Stage)
_OPS = tuple(op.name.lower() for op in Op)


@dataclass(frozen=True)
class Scope:
    """Which episodes are told of, and how fully."""

    episode: int
    """Their number, and the iteration of the events."""
    first: int
    """Number of the first environment."""
    steps: bool
    """Whether every decision is told; otherwise only changes of stage, verdicts, rollbacks and ends."""
    watched: Collection[int]
    """Numbers of the environments of which is told what the policy saw."""


class EventRecorder:
    """Makes events of the steps of E episodes, in order, from the first one on."""

    def __init__(self, episodes: Episodes, iteration: int, *, watched: range) -> None:
        self._episodes = episodes
        self._scope = scope
        self._watched = [number - scope.first for number in scope.watched if 0 <= number - scope.first < episodes.size]
        shape = (episodes.size, len(episodes.suite.sites))
        self._reasons = np.full(shape, Reason.NO_GATE, np.int8)
        self._judged_stages = np.full(shape, Stage.DORMANT, np.int8)
        self._contributions = np.full(shape, np.nan)
        self._paid = np.zeros(episodes.size)
        self._number = 0

    def record_start(self) -> Iterator[Event]:
        """The episodes begin."""
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
            )

    def record_observation(self, observation: Observation, step: PolicyStep) -> Iterator[Event]:
        """What the policy saw and thought before a decision, of the watched networks."""
        for row in self._watched:
            if self._episodes.finished[row]:
                continue
            relevant = RELEVANT[int(step.actions[row, Head.OP])]
            likely = {head: step.head_log_probs[head][row].exp() for head in Head if relevant[head]}
            yield PolicyLooked(
                **self._place(row),
                globals=_nest(observation.globals[row]),
                slots=_nest(observation.slots[row]),
                blueprints=_nest(observation.blueprints[row]),
                probabilities={head.name.lower(): _nest(probabilities) for head, probabilities in likely.items()},
            )

    def record_step(self, actions: Ints, result: StepResult, policy: PolicyStep | None) -> Iterator[Event]:
        """A decision and what it led to; ``policy`` is what decided, if it was a policy."""
        yield from self._record_verdicts(result)
        yield from self._record_transitions(result)
        self._contributions = result.evaluation.accuracy_contribution
        self._paid += result.reward
        if self._scope.steps:
            yield from self._record_decisions(actions, result, policy)
        for incident in result.rollbacks:
            yield RolledBack(
                **self._place(incident.environment),
                trouble=incident.trouble,
                loss_before=incident.loss_before,
                metric_before=incident.accuracy_before,
                loss_after=incident.loss_after,
                metric_after=incident.accuracy_after,
                pruned=incident.pruned,
                ended=incident.ended,
            )
        yield from self._record_ends(result)
        self._number += 1

    def _place(self, row: int) -> NetworkStep:
        number = self._scope.episode
        return NetworkStep(iteration=number, episode=number, environment=self._scope.first + row, step=self._number)

    def _blueprint_name(self, blueprint: int) -> str | None:
        return None if blueprint == NO_BLUEPRINT else self._episodes.suite.blueprints[blueprint]

    def _record_verdicts(self, result: StepResult) -> Iterator[Event]:
        """Gates that say something else than before, or that others stood in the place of."""
        reasons, stages = result.verdicts.reason, result.reward_inputs.before.stage
        other = (reasons != self._reasons) | (stages != self._judged_stages)
        changed = other & (reasons != Reason.NO_GATE) & result.running[:, None]
        self._reasons, self._judged_stages = reasons, stages
        for row, slot in np.argwhere(changed).tolist():
            reason, gate = Reason(reasons[row, slot]), GATES[Stage(stages[row, slot])]
            yield GateJudged(
                **self._place(row), slot=slot, gate=gate, passed=reason is Reason.PASSED, reason=reason.name.lower()
            )

    def _record_transitions(self, result: StepResult) -> Iterator[Event]:
        changes = result.transitions
        for index in range(len(changes)):
            row, slot = int(changes.env[index]), int(changes.slot[index])
            if not result.running[row]:
                continue  # cooldowns go on where an episode is over
            yield LifecycleTransition(
                **self._place(row),
                slot=slot,
                before=Stage(changes.before[index]).name.lower(),
                after=Stage(changes.after[index]).name.lower(),
                blueprint=self._blueprint_name(int(changes.blueprint[index])),
                cause=Cause(changes.cause[index]).name.lower(),
                reason=Reason(changes.reason[index]).name.lower(),
                contribution=_drop_unmeasured([float(self._contributions[row, slot])])[0],
            )

    def _record_decisions(self, actions: Ints, result: StepResult, policy: PolicyStep | None) -> Iterator[Event]:
        columns = {**self._describe_actions(actions, policy), **self._describe_networks(result)}
        terms = {name: _round(term) for name, term in result.terms.items()}
        for row in result.running.nonzero()[0].tolist():
            yield StepTaken(
                **self._place(row),
                terms={name: term[row] for name, term in terms.items() if term[row]},
                **{name: column[row] for name, column in columns.items()},
            )

    def _describe_actions(self, actions: Ints, policy: PolicyStep | None) -> dict[str, list[Any]]:
        """Fields of `StepTaken` about the decisions, an entry per network."""
        blueprints, taken = self._episodes.suite.blueprints, actions.tolist()
        nothing: list[None] = [None] * len(taken)
        return {
            "op": [_OPS[one[Head.OP]] for one in taken],
            "slot": [None if one[Head.OP] == Op.WAIT else one[Head.SLOT] for one in taken],
            "blueprint": [blueprints[one[Head.BLUEPRINT]] if one[Head.OP] == Op.GERMINATE else None for one in taken],
            "choices": [describe_choices(one) for one in taken],
            "value": nothing if policy is None else _round(policy.value.cpu().numpy()),
            "log_prob": nothing if policy is None else _round(policy.log_prob.cpu().numpy()),
        }

    def _describe_networks(self, result: StepResult) -> dict[str, list[Any]]:
        """Fields of `StepTaken` about what the decisions led to, an entry per network."""
        population, table = self._episodes.population, self._episodes.population.table
        return {
            "reward": _round(result.reward),
            "train_loss": _round(result.training.loss),
            "loss": _round(result.evaluation.loss),
            "metric": _round(result.evaluation.accuracy),
            "objective": _round(result.potential),
            "added": _round(population.count_seed_parameters(table.blended) / population.host_parameters),
            "stages": [tuple(_STAGES[stage] for stage in row) for row in cast("list[list[int]]", table.stage.tolist())],
            "blueprints": [tuple(map(self._blueprint_name, row)) for row in table.blueprint.tolist()],
            "alphas": [tuple(row) for row in _round(table.alpha)],
            "contributions": [_drop_unmeasured(row) for row in _round(result.evaluation.accuracy_contribution)],
        }

    def _record_ends(self, result: StepResult) -> Iterator[Event]:
        """Episodes that this step was the last of."""
        ended = result.finished & result.running
        if not ended.any():
            return
        population, table = self._episodes.population, self._episodes.population.table
        kept = table.stage == Stage.FOSSILIZED
        added = population.count_seed_parameters(kept) / population.host_parameters
        for row in ended.nonzero()[0].tolist():
            yield EpisodeEnded(
                **self._place(row),
                objective=float(result.potential[row]),
                accuracy=float(result.reward_inputs.after.score["accuracy"][row]),
                added=float(added[row]),
                paid=float(self._paid[row]),
                kept=tuple(map(self._blueprint_name, np.where(kept, table.blueprint, NO_BLUEPRINT)[row].tolist())),
            )


def _round(values: NDArray[np.floating]) -> list[Any]:
    return np.round(values.astype(np.float64), _DECIMALS).tolist()


def _drop_unmeasured(values: Sequence[float]) -> tuple[float | None, ...]:
    """The values, with None for those that were not measured."""
    return tuple(None if math.isnan(value) else value for value in values)


def _nest(values: Tensor) -> tuple[Any, ...]:
    """A tensor's values, as tuples of tuples."""
    return _as_tuple(_round(values.cpu().numpy()))


def _as_tuple(values: Any) -> Any:
    return tuple(map(_as_tuple, cast("list[Any]", values))) if isinstance(values, list) else values


def describe_run(settings: TrainSettings) -> dict[str, Any]:
    """Metadata by key; lists are indexed by the numbers that events use."""
    suite = get_suite(settings.suite)
    return {
        "command": "train",
        "seed": settings.seed,
        "suite": suite.name,
        "environments": settings.environments,
        "iterations": settings.iterations,
        "steps": suite.steps,
        "slots": list(suite.sites),
        "blueprints": list(suite.blueprints),
        "operations": [op.name.lower() for op in Op],
        "heads": [head.name.lower() for head in Head],
        "features": name_features(settings.policy, settings.promise),
        **(LOSS_REDUCTION.metadata() if suite.objective == "loss" and not settings.mix else {}),
    }
