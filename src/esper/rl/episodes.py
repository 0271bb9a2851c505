"""E episodes side by side: the growth engine on a population, with training, ends and rewards of episodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from esper.engine.engine import GrowthConfig, GrowthEngine
from esper.engine.governor import Intervention
from esper.engine.measurements import Evaluation, TrainingReport
from esper.engine.observation import Observation
from esper.lifecycle.actions import Op, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Rules
from esper.lifecycle.table import Stage
from esper.lifecycle.transitions import Transitions, concatenate_transitions
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.backend import PopulationBackend
from esper.population.forward import find_fastest_strategy
from esper.population.learning import Batch, TrainingStream, draw_shuffled_order, stack_data, start_training
from esper.population.population import Fossils, NetworkSpec, Population, PopulationConfig, StrategyChoice
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


@dataclass(frozen=True)
class StepResult:
    """The results of one decision."""

    reward: Floats
    """``[E]``; 0 in episodes that had ended before."""
    terms: RewardTerms
    """The terms that rewards are the sum of, ``[E]`` each, in episodes that had not ended before."""
    finished: Bools
    """``[E]``: the episode is over, by its horizon, a plateau or a divergence: termination, not truncation."""
    running: Bools
    """``[E]``: the step was part of the episode, which had not ended before."""
    transitions: Transitions
    """By the decision, and by rollbacks after it."""
    training: TrainingReport
    """How the minibatches that followed it went."""
    evaluation: Evaluation
    """After rollbacks."""
    potential: Floats
    """``[E]``: J of the network; of what was committed, in finished episodes."""
    intervention: Intervention
    """What the governor did."""
    reward_inputs: RewardInputs
    """The inputs of reward modes for the step."""


@dataclass(frozen=True)
class FinalScore:
    """How finished episodes ended. All ``[E]``."""

    score: Floats
    """``accuracy - rent * log1p(added / host)`` of the committed network."""
    accuracy: Floats
    """On suites about the loss, the fraction of the chance loss that is removed."""
    added_parameters: Ints


class Episodes:
    """A population on a suite's instances, from the first decision to the last.

    Episode i depends only on its instance and its actions, not on E or on other episodes.

    Args:
        suite: The suite of problems.
        instances: The instances, one per network.
        rules: Lifecycle rules of modules.
        config: Governor, budget, plateau, and how often modules are measured.
        rewards: Reward settings, one per network; empty: the outcome reward for every network.
        fossils: Modules that each network has from the first step; empty: none.
        strategy: How networks are computed; ``auto`` times both strategies and takes the faster one.
        networks_per_pass: Maximum number of networks computed at once; None: all.
        examples_per_pass: Maximum number of examples of a network computed at once; None: all.
        bf16: Whether forward passes are computed under autocast in bfloat16.
        device: Device of the networks.
    """

    def __init__(
        self,
        suite: Suite,
        instances: Sequence[Instance],
        rules: Rules,
        config: GrowthConfig = GrowthConfig(),  # noqa: B008 (immutable)
        *,
        rewards: Sequence[RewardSettings] = (),
        fossils: Sequence[Fossils] = (),
        strategy: StrategyChoice = "stacked",
        networks_per_pass: int | None = None,
        examples_per_pass: int | None = None,
        bf16: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.suite, self.device, self.instances, self.size = suite, device, list(instances), len(instances)
        _require_known(suite, instances)

        # The networks and what they learn from.
        specs = [
            _specify_network(suite, instance, modules)
            for instance, modules in zip(instances, fossils or [()] * self.size, strict=True)
        ]
        plan = PopulationConfig(
            suite.template(),
            suite.sites,
            suite.blueprints,
            torch.zeros(2, *suite.input_shape),
            suite.optimizer,
            rules,
            "stacked" if strategy == "auto" else strategy,
            networks_per_pass,
            examples_per_pass,
            bf16,
            device=device,
            budget=config.budget.within(suite.parameter_cap),
            gradient_health=config.gradient_health,
        )
        self.population = Population(plan, specs)
        capacity = max(instance.train_size for instance in instances)
        self._stream = TrainingStream(
            [suite.data(instance, "train") for instance in instances],
            [self._draw_order(instance) for instance in instances],
            suite.batch_size,
            capacity,
            device,
        )
        validation = stack_data([suite.data(instance, "validation") for instance in instances], device)

        # The engine of their growth, and the rewards of that.
        self._config = config
        self.backend = PopulationBackend(self.population, suite, validation, self._newest_examples)
        self.engine = GrowthEngine(self.backend, config)
        self._read_instances()
        self._paid_by = group_by_settings(rewards or [OUTCOME] * self.size)
        self._tracker = RewardTracker(suite, self.population, self.instances)
        self.finished: Bools = np.zeros(self.size, np.bool_)
        """Which episodes have ended, ``[E]``."""
        self.potential: Floats = np.zeros(self.size)
        """J after the last step, on validation data; of what was committed, in finished episodes; ``[E]``."""
        if strategy == "auto":
            self.population.strategy = find_fastest_strategy(self.population, validation.inputs)

    @property
    def step_index(self) -> Ints:
        """Number of decisions taken in the current episodes, ``[E]``."""
        return self.engine.decisions

    @property
    def validation(self) -> Batch:
        """The data on which every network is currently measured, ``[E, N, ...]``."""
        return self.backend.validation

    def observe(self) -> Observation:
        """The current observations of the controllers, on the CPU."""
        steps = self.suite.steps
        return self.engine.observe(self.step_index / steps, steps, self._rent, self._train_size)

    def legal_actions(self) -> ActionMasks:
        """The legal actions of the controllers; in episodes that have ended, only to wait."""
        return self.engine.legal_actions(np.repeat(self.finished[:, None], len(Op), axis=1))

    def step(self, actions: Ints) -> StepResult:
        """Take one decision per network, int64 ``[E, 8]``, train on its minibatches, and measure.

        The networks of episodes that have ended do not learn, and their actions are ignored.
        """
        running = ~self.finished
        actions = np.where(running[:, None], actions, make_wait_actions(self.size))

        # The decision changes slots at once, and then data drift. Both go by this decision's number, which `apply`
        # advances.
        first_batch = self.step_index % self.suite.steps * self.suite.batches_per_step
        drifting = running & (self.step_index == self._drift_step)
        decided_on = self.population.table
        decision = self.engine.apply(actions, running=running)
        self._drift(drifting)

        # Then hosts and modules learn, all networks are measured, and those that diverged are rolled back.
        batches = self._stream.draw_batches(first_batch, self.suite.batches_per_step)
        training = start_training(self.population, batches, frozen=~running)
        assessed = self.engine.assess(training, running)
        evaluation, intervention = assessed.evaluation, assessed.intervention

        # Episodes end at their horizon, on a plateau, or after one rollback too many. They are scored by what they
        # commit.
        ended = (self.step_index >= self.suite.steps) | intervention.exhausted | self.engine.find_stalled()
        ending = running & ended
        self.finished = self.finished | ending
        self.engine.measure_promises(running, running & ~self.finished)
        commitment = self.backend.evaluate_committed(self.validation) if ending.any() else None

        # Now everything that a reward depends on has been measured.
        inputs = self._tracker.record(actions, decided_on, evaluation, commitment, self.finished)
        self.potential = np.where(running, compute_objective(inputs.after, OUTCOME), self.potential)
        penalty = np.where(intervention.rows, -self.engine.governor.penalty, 0.0)
        terms = {**compute_rewards(inputs, self._paid_by), ROLLBACK: penalty}
        return StepResult(
            reward=np.where(running, sum_reward_terms(terms), 0.0),
            terms=terms,
            finished=self.finished,
            running=running,
            transitions=concatenate_transitions([decision.transitions, intervention.transitions]),
            training=assessed.training,
            evaluation=evaluation,
            potential=self.potential,
            intervention=intervention,
            reward_inputs=inputs,
        )

    def _newest_examples(self) -> Batch:
        """The newest training examples: as many as promises need, or those since the last decision."""
        assert self._config.promise is not None, "promises are measured only where they have settings"
        suite, requested = self.suite, self._config.promise.examples
        count = min(-(-requested // suite.batch_size), suite.batches_per_step)
        batches = list(self._stream.draw_batches(self.step_index * suite.batches_per_step - count, count))
        return Batch(*(torch.cat(parts, 1)[:, -requested:] for parts in zip(*batches, strict=True)))

    def restart(self, rows: Ints, instances: Sequence[Instance]) -> None:
        """Start new episodes in ``rows``, int64 ``[r]``, without fossils; all others continue unchanged."""
        _require_known(self.suite, instances)
        self.population.replace(rows, [_specify_network(self.suite, instance) for instance in instances])
        restarted = np.isin(np.arange(self.size), rows)
        self.engine.restart(restarted)
        self.finished = self.finished & ~restarted
        self.potential = np.where(restarted, 0.0, self.potential)
        for row, instance in zip(rows.tolist(), instances, strict=True):
            self.instances[row] = instance
            self._stream.replace(row, self.suite.data(instance, "train"), self._draw_order(instance))
        self._set_validation(rows, [self.suite.data(instance, "validation") for instance in instances])
        self._read_instances()
        self._tracker.restart(restarted, self.instances)

    def final_score(self) -> FinalScore:
        """Score the committed networks on the test data, which are used for nothing else."""
        phases = (self.step_index >= self._drift_step).astype(int).tolist()
        data = [
            self.suite.data(instance, "test", phase) for instance, phase in zip(self.instances, phases, strict=True)
        ]
        accuracy = self.backend.evaluate_committed(stack_data(data, self.device)).accuracy
        added = self.population.count_seed_parameters(self.population.table.stage == Stage.FOSSILIZED)
        rent = compute_rent(added, self.population.host_parameters, self._rent)
        return FinalScore(accuracy - rent, accuracy, added)

    def _read_instances(self) -> None:
        """Keep the settings of all instances that steps need, each ``[E]``."""
        instances = self.instances
        self._rent: Floats = np.array([instance.rent for instance in instances])
        self._train_size: Floats = np.array([instance.train_size for instance in instances], float)
        # Infinity where nothing drifts.
        drifts = [np.inf if instance.drift_step is None else instance.drift_step for instance in instances]
        self._drift_step: Floats = np.array(drifts)

    def _drift(self, drifting: Bools) -> None:
        """Change the data of the networks ``drifting``, bool ``[E]``."""
        rows = drifting.nonzero()[0]
        for row in rows.tolist():
            self._stream.replace(row, self.suite.data(self.instances[row], "train", 1))
        if len(rows):
            self._set_validation(rows, [self.suite.data(self.instances[row], "validation", 1) for row in rows.tolist()])
        self.engine.governor.expect_change(drifting, forget_skill=drifting)

    def _set_validation(self, rows: Ints, data: Sequence[Data]) -> None:
        """Replace the data on which the networks ``rows``, int64 ``[r]``, are measured by their new data."""
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        for present, new in zip(self.validation, stack_data(data, self.device), strict=True):
            present.index_copy_(0, index, new)

    def _draw_order(self, instance: Instance) -> Ints:
        rng = numpy_generator(instance.seed, Stream.DATA_ORDER)
        count = self.suite.steps * self.suite.batches_per_step * self.suite.batch_size
        return draw_shuffled_order(instance.train_size, count, rng)


def _specify_network(suite: Suite, instance: Instance, fossils: Fossils = ()) -> NetworkSpec:
    return NetworkSpec(suite.host(instance), instance.widths, instance.learning_rate, instance.seed, fossils)


def _require_known(suite: Suite, instances: Sequence[Instance]) -> None:
    for instance in instances:
        suite.check(instance)
