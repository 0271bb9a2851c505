"""E episodes side by side: every network is decided for, trained, measured and scored, one decision at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from esper.engine.config import EpisodeConfig
from esper.engine.history import History
from esper.engine.observation import FeatureInputs, Observation, observe
from esper.engine.promises import PromiseRecord
from esper.lifecycle.actions import make_wait_actions
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.rules import Rules, Verdicts
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Transitions, concatenate_transitions
from esper.numerics.arrays import Bools, Floats, Ints, replace_where
from esper.numerics.deferred import Deferred
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.evaluation import (
    CommittedEvaluation,
    Evaluation,
    evaluate,
    evaluate_committed,
    remember,
    start_evaluation,
)
from esper.population.forward import find_fastest_strategy
from esper.population.governor import PopulationGovernor, Trouble
from esper.population.governor.population import Intervention
from esper.population.learning import Batch, TrainingReport, TrainingStream, shuffled_order, stack_data, start_training
from esper.population.population import Actions, Fossils, NetworkSpec, Population, PopulationConfig, StrategyChoice
from esper.population.promise import PromiseMeter
from esper.rl.rewards import (
    OUTCOME,
    ROLLBACK,
    RewardInputs,
    RewardSettings,
    RewardTerms,
    RewardTracker,
    compute_objective,
    compute_rent,
    compute_rewards,
    group_by_settings,
    sum_reward_terms,
)
from esper.tasks.instance import Data, Instance
from esper.tasks.suite import Suite

CPU = torch.device("cpu")
Measured = TypeVar("Measured", Evaluation, CommittedEvaluation)


@dataclass(frozen=True)
class NetworkRollback:
    """One rollback of one network by the governor; losses in nats and accuracies on validation data."""

    environment: int
    trouble: str
    """Name of a `Trouble`, in lower case."""
    loss_before: float
    accuracy_before: float
    loss_after: float
    accuracy_after: float
    pruned: tuple[int, ...]
    """Slots whose seeds are gone."""
    ended: bool
    """Whether it was one rollback too many, so that the episode has ended."""


@dataclass(frozen=True)
class StepResult:
    """What one decision led to."""

    reward: Floats
    """``[E]``; 0 in episodes that had ended before."""
    terms: RewardTerms
    """What the rewards are the sum of, ``[E]`` each, in episodes that had not."""
    finished: Bools
    """``[E]``: the episode is over, by its horizon, a plateau or a divergence. All of them are observed and part of the
    problem: termination, not truncation."""
    running: Bools
    """``[E]``: the step was part of the episode, which had not ended before."""
    verdicts: Verdicts
    """Verdict of the gate ahead of each slot, before the decision."""
    transitions: Transitions
    """By the decision, and by rollbacks after it."""
    training: TrainingReport
    """How the minibatches that followed it went."""
    evaluation: Evaluation
    """After rollbacks."""
    potential: Floats
    """``[E]``: J of the network; of what was committed, in finished episodes."""
    incidents: list[NetworkRollback]
    """Rollbacks."""
    reward_inputs: RewardInputs
    """What reward modes see of the step."""


@dataclass(frozen=True)
class FinalScore:
    """How finished episodes ended. All ``[E]``."""

    score: Floats
    """``accuracy - rent * log1p(added / host)`` of the committed network."""
    accuracy: Floats
    """On suites about the loss, the share of a guess's loss that is gone."""
    added_parameters: Ints


class Episodes:
    """A population on a suite's instances, from the first decision to the last.

    What happens in episode i follows from its instance and its actions alone: not from E nor from its neighbours.
    ``fossils`` are what each network has from the first step on; none of them anything, if there are none.
    """

    def __init__(
        self,
        suite: Suite,
        instances: Sequence[Instance],
        rules: Rules,
        conduct: EpisodeConfig = EpisodeConfig(),  # noqa: B008 (immutable)
        *,
        rewards: Sequence[RewardSettings] = (),
        fossils: Sequence[Fossils] = (),
        strategy: StrategyChoice = "stacked",
        networks_per_pass: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.suite = suite
        self.device = device
        self._conduct = conduct
        self.instances = list(instances)
        self._problems = _Problems.of(instances)
        self.size = len(instances)
        _require_known(suite, instances)
        given = fossils or [()] * self.size
        networks = [_specify_network(suite, *one) for one in zip(instances, given, strict=True)]
        plan = PopulationConfig(
            suite.template(),
            suite.sites,
            suite.blueprints,
            torch.zeros(2, *suite.input_shape),
            suite.optimizer,
            rules,
            "stacked" if strategy == "auto" else strategy,
            networks_per_pass,
            device=device,
            budget=conduct.budget.within(suite.parameter_cap),
        )
        self.population = Population(plan, networks)
        self.governor = PopulationGovernor(self.population, conduct.governor, suite.classes)
        self._paid_by = group_by_settings(rewards or [OUTCOME] * self.size)
        self._tracker = RewardTracker(suite, self.population, self.instances)
        shape = self.size, len(suite.sites), len(suite.blueprints)
        self.history = History(*shape, suite.chance_loss, suite.chance_score)
        wanted = conduct.promise
        self.promises = None if wanted is None else PromiseRecord(*shape, wanted)
        """What blueprints promise, where it is measured."""
        self._meter = PromiseMeter(self.population)
        self.step_index: Ints = np.zeros(self.size, np.int64)
        """Decisions taken in the present episodes, ``[E]``."""
        self.finished: Bools = np.zeros(self.size, np.bool_)
        """Which episodes have come to their end, ``[E]``."""
        self.potential: Floats = np.zeros(self.size)
        """J after the last step, on validation data; of what was committed, in finished episodes; ``[E]``."""
        capacity = max(instance.train_size for instance in instances)
        self._stream = TrainingStream(
            [suite.data(instance, "train") for instance in instances],
            [self._draw_order(instance) for instance in instances],
            suite.batch_size,
            capacity,
            device,
        )
        self.validation = stack_data([suite.data(instance, "validation") for instance in instances], device)
        """What every network is measured on now, ``[E, N, ...]``."""
        if strategy == "auto":
            self.population.strategy = find_fastest_strategy(self.population, self.validation.inputs)

    def observe(self) -> Observation:
        """What the controllers see now, on the CPU."""
        view = FeatureInputs(
            self.population,
            self.history,
            self.step_index / self.suite.steps,
            self.suite.steps,
            self._problems.rent,
            self._problems.train_size,
            self.governor.rollbacks_used,
            self.promises,
        )
        return observe(view)

    def legal_actions(self) -> ActionMasks:
        """What the controllers may do now: in episodes that have ended, only wait."""
        masks = self.population.legal_actions()
        return masks.allow_only_waiting(self.finished) if self.finished.any() else masks

    def step(self, actions: Actions) -> StepResult:
        """One decision per network, int64 ``[E, 8]``, then its minibatches, then its measurement.

        Episodes that have ended may be carried along by the others until they are restarted: their networks rest, and
        their actions are not read.

        Raises:
            IllegalActionError: an action is not legal; nothing has changed then.
        """
        running = ~self.finished
        actions = np.where(running[:, None], actions, make_wait_actions(self.size))

        # The decision changes slots at once.
        decided_on = self.population.table
        decision = self.population.decide(actions)
        # A network that lost a seed, or whose problem is another one now, may well do worse.
        self.governor.expect_change(self._drift(running) | _lost_a_seed(decision.transitions, self.size))

        # Then hosts and seeds learn, all are measured, and whoever blew up is rolled back.
        first = self.step_index % self.suite.steps * self.suite.batches_per_step
        batches = self._stream.take(first, self.suite.batches_per_step)
        under_way = start_training(self.population, batches, resting=~running)
        training, evaluation, intervention, rollbacks = self._measure(under_way, running)
        if self.suite.objective == "loss":
            training = replace(training, accuracy=evaluation.accuracy)  # as a grower does that knows no accuracy
        remember(self.population, training, evaluation)
        self.history.record(actions, self.population.table, training, evaluation)

        # Episodes that end are scored by what they commit.
        self.step_index = self.step_index + running
        ending = running & self._reached_end(intervention)
        self.finished = self.finished | ending
        self._look(running)
        commitment = self._score(evaluate_committed(self.population, self.validation)) if ending.any() else None

        # Everything that a reward depends on is known now.
        inputs = self._tracker.record(actions, decided_on, evaluation, commitment, self.finished)
        self.potential = np.where(running, compute_objective(inputs.after, OUTCOME), self.potential)
        penalty = np.where(intervention.rows, -self.governor.penalty, 0.0)
        terms = {**compute_rewards(inputs, self._paid_by), ROLLBACK: penalty}
        return StepResult(
            reward=np.where(running, sum_reward_terms(terms), 0.0),
            terms=terms,
            finished=self.finished,
            running=running,
            verdicts=decision.verdicts,
            transitions=concatenate_transitions([decision.transitions, intervention.transitions]),
            training=training,
            evaluation=evaluation,
            potential=self.potential,
            incidents=rollbacks,
            reward_inputs=inputs,
        )

    def _measure(
        self, under_way: Deferred[TrainingReport], running: Bools
    ) -> tuple[TrainingReport, Evaluation, Intervention, list[NetworkRollback]]:
        """Evaluate the networks, and those that had to be rolled back again, as they are now."""
        due = self._conduct.find_due_counterfactuals(self.step_index, self.population.table.slots)
        measured = start_evaluation(self.population, self.validation, due)
        (training, found), finite = under_way.combine(measured).combine(self.governor.finite()).fetch()
        evaluation = self.history.fill_stale_contributions(found, self.population.evidence)
        intervention = self.governor.check(training, evaluation, finite, running)
        if not intervention.rows.any():
            return training, self._score(evaluation), intervention, []
        # What was known of their fossils is of networks that are no more.
        again = evaluate(self.population, self.validation, due | intervention.rows[:, None])
        newer = self.history.fill_stale_contributions(again, self.population.evidence)
        before, after = map(self._score, (evaluation, replace_where(intervention.rows, evaluation, newer)))
        return training, after, intervention, _list_incidents(intervention, before, after)

    def _score(self, measured: Measured) -> Measured:
        """By what the suite is about; the governor goes by the accuracy all the same."""
        by_accuracy = self.suite.objective == "accuracy"
        return measured if by_accuracy else measured.score_losses(self.suite.chance_loss)

    def _look(self, running: Bools) -> None:
        """Measure what blueprints promise in free slots, by the newest training examples, where it is time to."""
        if (promises := self.promises) is None:
            return
        promises.advance_age(running)
        due = running & ~self.finished & promises.settings.is_due(self.step_index)
        if not due.any():
            return
        suite, wanted = self.suite, promises.settings.examples
        count = min(-(-wanted // suite.batch_size), suite.batches_per_step)
        batches = list(self._stream.take(self.step_index * suite.batches_per_step - count, count))
        newest = (torch.cat(parts, 1)[:, -wanted:] for parts in zip(*batches, strict=True))
        free = self.population.table.stage == Stage.DORMANT
        found = self._meter.measure(Batch(*newest), free & due[:, None]).fetch()
        promises.record(due, found.fitted, found.held_out)

    def _reached_end(self, intervention: Intervention) -> Bools:
        """``[E]``: the episodes that have just reached their horizon, a plateau, or one divergence too many."""
        stalled = self._conduct.find_stalled(self.history.plateau_age, self.population.table)
        return (self.step_index >= self.suite.steps) | intervention.exhausted | stalled

    def restart(self, rows: Ints, instances: Sequence[Instance]) -> None:
        """Begin new episodes in ``rows``, int64 ``[r]``; all others go on untouched."""
        _require_known(self.suite, instances)
        self.population.replace(rows, [_specify_network(self.suite, instance) for instance in instances])
        everyone = np.zeros(self.size, np.bool_)
        everyone[rows] = True
        self.history.restart(everyone)
        if self.promises is not None:
            self.promises.restart(everyone)
        self.governor.restart(everyone)
        self.finished = self.finished & ~everyone
        self.step_index = np.where(everyone, 0, self.step_index)
        self.potential = np.where(everyone, 0.0, self.potential)
        for row, instance in zip(rows.tolist(), instances, strict=True):
            self.instances[row] = instance
            self._stream.replace(row, self.suite.data(instance, "train"), self._draw_order(instance))
            self._set_validation(row, self.suite.data(instance, "validation"))
        self._problems = _Problems.of(self.instances)
        self._tracker.restart(everyone, self.instances)

    def final_score(self) -> FinalScore:
        """Score the committed networks on the test data, which nothing else reads."""
        data = [self.suite.data(instance, "test", self._find_phase(row)) for row, instance in enumerate(self.instances)]
        accuracy = self._score(evaluate_committed(self.population, stack_data(data, self.device))).accuracy
        added = self.population.parameters_in(self.population.table.stage == Stage.FOSSILIZED)
        rent = compute_rent(added, self.population.host_parameters, self._problems.rent)
        return FinalScore(accuracy - rent, accuracy, added)

    def _find_phase(self, row: int) -> int:
        return int(self.step_index[row] >= self._problems.drift_step[row])

    def _drift(self, running: Bools) -> Bools:
        """Change the data of the networks whose problem drifts at this step, bool ``[E]``."""
        drifting: Bools = running & (self.step_index == self._problems.drift_step)
        for row in drifting.nonzero()[0].tolist():
            instance = self.instances[row]
            self._stream.replace(row, self.suite.data(instance, "train", 1))
            self._set_validation(row, self.suite.data(instance, "validation", 1))
        return drifting

    def _set_validation(self, row: int, data: Data) -> None:
        inputs, labels = self.validation
        inputs[row] = data.inputs.to(inputs, non_blocking=True)
        labels[row] = data.labels.to(labels, non_blocking=True)
        self.validation = Batch(inputs, labels)

    def _draw_order(self, instance: Instance) -> Ints:
        rng = numpy_generator(instance.seed, Stream.DATA_ORDER)
        count = self.suite.steps * self.suite.batches_per_step * self.suite.batch_size
        return shuffled_order(instance.train_size, count, rng)


@dataclass(frozen=True)
class _Problems:
    """What steps need to know of all instances, each ``[E]``."""

    rent: Floats
    train_size: Floats
    drift_step: Floats
    """Infinity where nothing drifts."""

    @classmethod
    def of(cls, instances: Sequence[Instance]) -> _Problems:
        return cls(
            np.array([instance.rent for instance in instances]),
            np.array([instance.train_size for instance in instances], float),
            np.array([np.inf if instance.drift_step is None else instance.drift_step for instance in instances]),
        )


def _list_incidents(intervention: Intervention, before: Evaluation, after: Evaluation) -> list[NetworkRollback]:
    """One record per network that was rolled back."""
    changes = intervention.transitions
    return [
        NetworkRollback(
            row,
            Trouble(intervention.trouble[row]).name.lower(),
            float(before.loss[row]),
            float(before.accuracy[row]),
            float(after.loss[row]),
            float(after.accuracy[row]),
            tuple(changes.slot[changes.env == row].tolist()),
            bool(intervention.exhausted[row]),
        )
        for row in intervention.rows.nonzero()[0].tolist()
    ]


def _lost_a_seed(changes: Transitions, size: int) -> Bools:
    """``[E]``: the networks that have lost a seed."""
    rows = np.zeros(size, np.bool_)
    rows[changes.env[changes.after == Stage.PRUNED]] = True
    return rows


def _specify_network(suite: Suite, instance: Instance, fossils: Fossils = ()) -> NetworkSpec:
    return NetworkSpec(suite.host(instance), instance.widths, instance.learning_rate, instance.seed, fossils)


def _require_known(suite: Suite, instances: Sequence[Instance]) -> None:
    for instance in instances:
        suite.check(instance)
