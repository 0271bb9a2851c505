"""Proximal policy optimisation (Schulman et al., 2017) of the recurrent policy, on whole aligned episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from esper.control.observation import Observation
from esper.control.policy import Policy
from esper.errors import ConfigError
from esper.rl.batch import Batch
from esper.rl.course import Course
from esper.rl.diagnostics import UpdateMetrics
from esper.rl.gae import advantages, minus_group_mean
from esper.rl.objective import Objective
from esper.rl.optimizer import PolicyOptimizer
from esper.rl.rollout import Rollout
from esper.rl.saved import check_kinds, under
from esper.rl.settings import PPOSettings
from esper.rl.twins import minus_twin

KL_STOP = 1.5
"""An update ends once the KL divergence exceeds this multiple of its target."""


class Learner:
    """Owns the policy with its statistics and the optimizer; `state_tensors` is all that is needed to go on."""

    def __init__(self, policy: Policy, settings: PPOSettings, seed: int) -> None:
        """``seed`` and the number of the update decide the order of minibatches. The policy is on its final device.

        Raises ConfigError if the settings do not suit that device.
        """
        if settings.bf16 and policy.device.type != "cuda":
            raise ConfigError(
                f"ppo.bf16 speeds up CUDA devices only and the policy learns on {policy.device.type}: set it to false"
            )
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.updates = 0
        self._objective = Objective(policy, settings)
        self._optimizer = PolicyOptimizer(policy, settings)

    def update(self, rollout: Rollout, progress: float) -> UpdateMetrics:
        """Learn from one rollout at ``progress`` (0 at the start of training, 1 at its end).

        The policy's statistics stand still until all steps are done and then take in the rollout once. If a loss or
        gradient is not finite, that step and the rest are left out and the statistics stay as they are.
        Raises ConfigError if the number of environments does not suit the settings.
        """
        self._check(rollout.environments)
        batch = self.batch(rollout)
        course = self._descend(batch.standardised() if self.settings.normalise_advantages else batch, progress)
        if course.finite:
            running = rollout.running
            seen = Observation(*(part[running] for part in rollout.observations))
            self.policy.recalibrate(seen, batch.target[running])
        self.updates += 1
        return course.metrics(batch, self._optimizer.module_names, self.settings, progress)

    def batch(self, rollout: Rollout) -> Batch:
        """The rollout with its advantages and its returns.

        Both are relative to the twins', where there are twins, and advantages to the group, where there are groups.
        """
        settings, running = self.settings, rollout.running
        advantage = advantages(
            minus_twin(rollout.reward, rollout.twin_reward, running, settings.gamma),
            rollout.value,
            rollout.final_value,
            running,
            settings.gamma,
            settings.gae_lambda,
        )
        target = advantage + rollout.value
        if settings.group > 1:
            advantage = minus_group_mean(advantage, settings.group)
        is_open = self.policy.open_heads(rollout.masks, rollout.actions) & running.unsqueeze(-1)
        return Batch(rollout, advantage, target, is_open)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of all that `load_state_tensors` needs to continue exactly: weights, statistics, moments, counters."""
        return {
            "updates": torch.tensor(self.updates),
            **{f"policy.{name}": value.clone() for name, value in self.policy.state_dict().items()},
            **{f"optimizer.{name}": value for name, value in self._optimizer.state_tensors().items()},
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `state_tensors` of a learner with the same policy and settings.

        Raises CheckpointError, and changes nothing, if names, shapes or types differ.
        """
        policy, optimizer = under("policy.", tensors), under("optimizer.", tensors)
        expected = {"updates": torch.tensor(self.updates)}
        expected |= {f"policy.{name}": value for name, value in self.policy.state_dict().items()}
        if optimizer:
            expected |= {f"optimizer.{name}": value for name, value in self._optimizer.expected_tensors().items()}
        check_kinds(tensors, expected)
        self.policy.load_state_dict(policy)
        self._optimizer.load_state_tensors(optimizer)
        self.updates = int(tensors["updates"])

    def _check(self, environments: int) -> None:
        minibatches, group = self.settings.minibatches, self.settings.group
        if environments < minibatches:
            raise ConfigError(
                f"{environments} environments cannot be split into {minibatches} minibatches: "
                "lower minibatches or raise the number of environments"
            )
        if environments % group:
            raise ConfigError(
                f"{environments} environments cannot be split into groups of {group}: make one a multiple of the other"
            )

    def _minibatches(self, environments: int) -> Iterator[Tensor]:
        """Indices of environments, in a new order each epoch: a function of the seed and the update's number."""
        words = np.random.SeedSequence((self.seed, self.updates)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]))
        for _ in range(self.settings.epochs):
            order = torch.randperm(environments, generator=generator).to(self.policy.device)
            yield from order.tensor_split(self.settings.minibatches)

    def _descend(self, batch: Batch, progress: float) -> Course:
        """All optimizer steps, until the KL divergence or something not finite ends them."""
        settings, course = self.settings, Course()
        entropy_weights = torch.tensor(settings.entropy_weights(progress), device=self.policy.device)
        for index in self._minibatches(batch.rollout.environments):
            part = batch.at(index)
            self._optimizer.clear()
            measured = self._objective.backward(part, entropy_weights)
            if settings.bf16 and not course.measured:
                # Rounding to bfloat16 would pass for a policy that learns otherwise than it acted, and hide one.
                measured = measured._replace(deviation=self._objective.deviation(part.rollout))
            course.measured.append(measured)
            course.stopped = measured.kl.item() > KL_STOP * settings.target_kl
            if course.stopped:
                break
            norms = self._optimizer.clip()
            course.norms.append(norms)
            course.finite = bool(norms[-1].isfinite())
            if not course.finite:
                break
            self._optimizer.step(settings.learning_rate_at(progress))
            course.steps += 1
        self._optimizer.clear()
        return course
