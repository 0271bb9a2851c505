"""Record what happens to the networks of a population, step by step, as events of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.control.learned import name_features
from esper.control.policy import PolicyStep
from esper.engine.observation import Observation
from esper.engine.recorder import LifecycleRecorder, describe_gradients, replace_unmeasured
from esper.lifecycle.actions import RELEVANT, Head, Op, describe_choices
from esper.lifecycle.stages import Stage
from esper.numerics.arrays import Ints
from esper.rl.episodes import Episodes, StepResult
from esper.rl.rewards import OUTCOME, name_rewards
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    InteractionsMeasured,
    ModulePair,
    ModuleValue,
    NetworkStep,
    PolicyLooked,
    RolledBack,
    StepTaken,
)
from esper.runs.metric import ACCURACY, LOSS_REDUCTION
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.results import SeedShapley
from esper.train.settings import TrainSettings

_DECIMALS = 5
"""Number of decimals kept of measured figures, far below their noise."""


class EventRecorder:
    """Creates the events of E episodes, in order, from the first step."""

    def __init__(
        self,
        episodes: Episodes,
        iteration: int,
        *,
        rewards: Sequence[str] = (),
        first_environment: int = 0,
        records_steps: bool = True,
        watched: Collection[int] = (),
    ) -> None:
        """Record the episodes of ``iteration``, whose environments are numbered from ``first_environment``.

        ``rewards`` names the reward of each network; without it, all have the outcome reward.

        With ``records_steps``, every decision is recorded; otherwise only stage changes, verdicts, rollbacks and ends
        of episodes. For the environments with the numbers ``watched``, the policy's observations are recorded, too.
        """
        self._episodes = episodes
        self._iteration = iteration
        self._first_environment = first_environment
        self._rewards = rewards or name_rewards([OUTCOME]) * episodes.size
        self._records_steps = records_steps
        # Watched environments of other shards are recorded there.
        rows = [number - first_environment for number in watched]
        self._watched_rows = [row for row in rows if 0 <= row < episodes.size]
        # The newest verdicts, contributions and rewards, to find changes and compute sums.
        shape = (episodes.size, len(episodes.suite.sites))
        self._lifecycle = LifecycleRecorder(*shape, episodes.suite.blueprints)
        self._contributions = np.full(shape, np.nan)
        self._paid = np.zeros(episodes.size)
        self._step = 0

    def _place(self, row: int) -> NetworkStep:
        return NetworkStep(
            iteration=self._iteration,
            episode=self._iteration,
            environment=self._first_environment + row,
            step=self._step,
        )

    def record_start(self) -> Iterator[Event]:
        """The events of the episodes' start."""
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
                globals=_to_tuples(observation.globals[row]),
                slots=_to_tuples(observation.slots[row]),
                blueprints=_to_tuples(observation.blueprints[row]),
                probabilities={
                    head.name.lower(): _to_tuples(step.head_log_probs[head][row].exp())
                    for head in Head
                    if relevant[head]
                },
            )

    def record_step(self, actions: Ints, result: StepResult, policy: PolicyStep | None) -> Iterator[Event]:
        """The events of one decision and its consequences; ``policy`` is None if a rule decided."""
        population, table = self._episodes.population, self._episodes.population.table
        blueprints = self._episodes.suite.blueprints
        running_rows: list[int] = result.running.nonzero()[0].tolist()

        # Verdicts of gates, and stage changes with the contribution that was known at the decision.
        yield from self._lifecycle.record_verdicts(
            result.verdicts, result.reward_inputs.before.stage, result.running, self._place
        )
        yield from self._lifecycle.record_transitions(
            result.transitions, self._contributions, result.running, self._place
        )
        self._contributions = result.evaluation.accuracy_contribution
        self._paid += result.reward

        # The decisions, their rewards, and the state of the networks. Columns are rounded once for all networks.
        if self._records_steps:
            stages, modules = self._lifecycle.describe_stages(table), self._lifecycle.describe_blueprints(table)
            terms = {name: _round(term) for name, term in result.terms.items()}
            reward, train_loss = _round(result.reward), _round(result.training.loss)
            loss, metric = _round(result.evaluation.loss), _round(result.evaluation.accuracy)
            objective = _round(result.potential)
            added = _round(population.count_seed_parameters(table.blended) / population.host_parameters)
            alphas, contributions = _round(table.alpha), _round(result.evaluation.accuracy_contribution)
            gradients = describe_gradients(result.training.health, population.evidence)
            values = None if policy is None else _round(policy.value.cpu().numpy())
            log_probs = None if policy is None else _round(policy.log_prob.cpu().numpy())
            for row in running_rows:
                action: list[int] = actions[row].tolist()
                op = Op(action[Head.OP])
                yield StepTaken(
                    **self._place(row),
                    op=op.name.lower(),
                    slot=None if op is Op.WAIT else action[Head.SLOT],
                    blueprint=blueprints[action[Head.BLUEPRINT]] if op is Op.GERMINATE else None,
                    choices=describe_choices(action),
                    value=None if values is None else values[row],
                    log_prob=None if log_probs is None else log_probs[row],
                    reward=reward[row],
                    terms={name: term[row] for name, term in terms.items() if term[row]},
                    train_loss=train_loss[row],
                    loss=loss[row],
                    metric=metric[row],
                    objective=objective[row],
                    added=added[row],
                    stages=stages[row],
                    blueprints=modules[row],
                    alphas=tuple(alphas[row]),
                    contributions=replace_unmeasured(contributions[row]),
                    **gradients[row],
                )

        # Rollbacks by the governor.
        for rollback in result.rollbacks:
            yield RolledBack(
                **self._place(rollback.environment),
                trouble=rollback.trouble,
                loss_before=rollback.loss_before,
                metric_before=rollback.accuracy_before,
                loss_after=rollback.loss_after,
                metric_after=rollback.accuracy_after,
                pruned=rollback.pruned,
                ended=rollback.ended,
            )

        # Episodes that ended with this step, with their committed modules.
        ended = [row for row in running_rows if result.finished[row]]
        if ended:
            kept = table.stage == Stage.FOSSILIZED
            committed = population.count_seed_parameters(kept) / population.host_parameters
            for row in ended:
                fossils: list[bool] = kept[row].tolist()
                indices: list[int] = table.blueprint[row].tolist()
                yield EpisodeEnded(
                    **self._place(row),
                    objective=float(result.potential[row]),
                    accuracy=float(result.reward_inputs.after.score["accuracy"][row]),
                    added=float(committed[row]),
                    paid=float(self._paid[row]),
                    kept=tuple(
                        blueprints[index] if fossil else None for index, fossil in zip(indices, fossils, strict=True)
                    ),
                )
        self._step += 1


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


def _round(values: NDArray[np.floating]) -> list[Any]:
    return np.round(values.astype(np.float64), _DECIMALS).tolist()


def _to_tuples(values: Tensor | list[Any]) -> tuple[Any, ...]:
    """The rounded values of a tensor, as nested tuples."""
    rows = _round(values.cpu().numpy()) if isinstance(values, Tensor) else values
    return tuple(_to_tuples(cast("list[Any]", row)) if isinstance(row, list) else row for row in rows)


def describe_run(settings: TrainSettings) -> dict[str, Any]:
    """The metadata of a training run, by key; numbers in events are indices into its lists."""
    suite = get_suite(settings.suite)
    return {
        "command": "train",
        "seed": settings.seed,
        "suite": suite.name,
        "environments": settings.environments,
        "iterations": settings.iterations,
        "steps": suite.steps,
        "slots": list(suite.slot_names),
        "blueprints": list(suite.blueprints),
        "operations": [op.name.lower() for op in Op],
        "heads": [head.name.lower() for head in Head],
        "features": name_features(settings.policy, settings.promise),
        **(LOSS_REDUCTION.metadata() if suite.objective == "loss" and not settings.mix else {}),
    }
