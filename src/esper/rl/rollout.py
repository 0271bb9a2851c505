"""Rollouts: complete episodes of E environments that started together, and the advantages that updates learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.control.policy import PolicyState, PolicyStep
from esper.engine.observation import MaskTensors, Observation
from esper.numerics.arrays import map_arrays, merge_arrays

SMALLEST = 1e-8
"""Added to deviations and variances that are divided by."""


class Rollout(NamedTuple):
    """T steps of E environments that began together. Observations are as the policy saw them, not normalised.

    An episode may end before step T; its later steps only fill the tensors.
    """

    observations: Observation
    """``[T, E, ...]``."""
    masks: MaskTensors
    """``[T, E, ...]``."""
    actions: Tensor
    """int64 ``[T, E, 8]``."""
    chosen_log_prob: Tensor
    """``[T, E, 8]`` of what each head of the acting policy chose; exactly 0 where the head is irrelevant."""
    value: Tensor
    """``[T, E]`` of the acting policy, in units of returns."""
    reward: Tensor
    """float32 ``[T, E]``."""
    running: Tensor
    """bool ``[T, E]``: whether the step belongs to the episode."""
    final_value: Tensor
    """``[E]``: 0 where the episode terminated, the value of the state after the last step where it was cut."""
    state: PolicyState
    """The policy's memory before the first step, ``[1, E, H]`` each."""
    control_variate: Tensor
    """float32 ``[T, E]``: the rewards of the no-growth baseline on the same instance; 0 without one."""

    @property
    def log_prob(self) -> Tensor:
        """``[T, E]`` of the whole action."""
        return self.chosen_log_prob.sum(-1)

    @property
    def steps(self) -> int:
        """T."""
        return self.reward.shape[0]

    @property
    def environments(self) -> int:
        """E."""
        return self.reward.shape[1]

    def to(self, device: torch.device) -> Rollout:
        """The rollout on ``device``."""
        return map_arrays(lambda part: part.to(device, non_blocking=part.device.type == "cpu"), self)


class PPOBatch(NamedTuple):
    """Whole episodes with their advantages and returns."""

    rollout: Rollout
    advantage: Tensor
    """``[T, E]``."""
    target: Tensor
    """Returns ``[T, E]`` less the control variate: the targets of the values."""
    is_open: Tensor
    """bool ``[T, E, 8]``: the step is part of the episode and the head had a choice."""


def select_running(batches: Sequence[PPOBatch], get_figures: Callable[[PPOBatch], Tensor]) -> Tensor:
    """The figures ``[T, E]`` of each batch at the steps that belong to its episodes, as one tensor ``[n]``."""
    return torch.cat([get_figures(batch)[batch.rollout.running] for batch in batches])


def standardise_advantages(batches: Sequence[PPOBatch]) -> list[PPOBatch]:
    """The batches with advantages of mean 0 and deviation 1 over all of them together."""
    advantages = select_running(batches, lambda batch: batch.advantage)
    mean, deviation = advantages.mean(), advantages.std() + SMALLEST
    return [batch._replace(advantage=(batch.advantage - mean) / deviation) for batch in batches]


RolloutOrBatch = TypeVar("RolloutOrBatch", Rollout, PPOBatch)
Tensors = TypeVar("Tensors")


def select_steps(tensors: Tensors, index: slice | Tensor) -> Tensors:
    """Tensors ``[T, E, ...]``, such as observations, at a slice of steps or, by bool ``[T, E]``, at some decisions."""
    return map_arrays(lambda tensor: tensor[index], tensors)


def select_environments(episodes: RolloutOrBatch, index: Tensor) -> RolloutOrBatch:
    """The whole episodes of the environments at ``index``, int64 ``[n]``."""
    return map_arrays(lambda part: part[index] if part.dim() == 1 else part[:, index], episodes)


def concatenate_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts of equal length as one, environments in order."""
    return merge_arrays(lambda parts: torch.cat(parts, 0 if parts[0].dim() == 1 else 1), rollouts)


def concatenate_by_shape(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """One rollout per length, number of slots and number of blueprints, in order of first appearance."""
    # Suites differ in steps, slots and blueprints; an update takes one rollout of each shape.
    groups: dict[tuple[int, ...], list[Rollout]] = {}
    for rollout in rollouts:
        steps, _, slots, blueprints, _ = rollout.observations.blueprints.shape
        groups.setdefault((steps, slots, blueprints), []).append(rollout)
    return [concatenate_rollouts(group) for group in groups.values()]


class _Step(NamedTuple):
    """One step of a rollout, ``[E, ...]``; its fields are the first ones of `Rollout`."""

    observations: Observation
    masks: MaskTensors
    actions: Tensor
    chosen_log_prob: Tensor
    value: Tensor
    reward: Tensor
    running: Tensor


class RolloutBuffer:
    """Collects a rollout step by step."""

    def __init__(self, state: PolicyState) -> None:
        """An empty buffer; ``state`` is the policy's memory before the first step, ``[1, E, H]``."""
        self._state = state
        self._steps: list[_Step] = []

    def add(
        self, observation: Observation, masks: MaskTensors, step: PolicyStep, reward: Tensor, running: Tensor
    ) -> None:
        """Append a step: observation, masks and decision, ``[E, ...]``, and the reward ``[E]`` that followed.

        ``running``, bool ``[E]``, is False where the episode had ended before this step.
        """
        stored = _Step(observation, masks, step.actions, step.chosen_log_prob, step.value, reward, running)
        self._steps.append(map_arrays(Tensor.detach, stored))

    def finish(self, terminated: Tensor, final_value: Tensor) -> Rollout:
        """The rollout, without a no-growth baseline.

        ``final_value [E]`` is used where ``terminated``, bool ``[E]``, is False. An episode that ended before the last
        step has terminated.
        """
        return Rollout(
            *merge_arrays(torch.stack, self._steps),
            # Nothing follows a terminated episode; a cut one goes on, worth what the policy expects of it.
            final_value=final_value.masked_fill(terminated, 0.0),
            state=self._state,
            control_variate=torch.zeros(len(self._steps), len(final_value), device=final_value.device),
        )


# Advantages: how much better a step turned out than expected, less what does not depend on the action.


def estimate_advantages(
    rewards: Tensor, values: Tensor, final_values: Tensor, running: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimates ``[T, E]`` (Schulman et al., 2016) of aligned episodes.

    A_t = sum_k (gamma lam)^k d_{t+k} with d_t = r_t + gamma V_{t+1} - V_t, where V_T is ``final_values [E]``: 0 where
    the episode terminated, the value of the next state where it was cut. All else is ``[T, E]``; where ``running`` is
    False, after an episode's end, rewards, values and advantages are 0.
    """
    rewards, values = rewards * running, values * running
    final_values = final_values * running[-1]
    next_values = torch.cat((values[1:], final_values[None]))
    return discount_rewards(rewards + gamma * next_values - values, gamma * lam)


def discount_rewards(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum ``[T, E]`` of the rewards ``[T, E]`` from each step on."""
    returns = torch.empty_like(rewards)
    next_return = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        next_return = rewards[step] + gamma * next_return
        returns[step] = next_return
    return returns


def subtract_group_mean(advantages: Tensor, group: int) -> Tensor:
    """Subtract from each environment's advantage ``[T, E]`` the mean of the others in its group, step by step.

    Environments i*group .. (i+1)*group - 1 work on the same instance, so the others' mean estimates what it is worth
    under the policy, and adds no bias, as it does not depend on the environment's own actions. ``group``, at
    least 2, divides E.
    """
    grouped = advantages.reshape(advantages.shape[0], -1, group)
    mean_of_others = (grouped.sum(-1, keepdim=True) - grouped) / (group - 1)
    return (grouped - mean_of_others).reshape(advantages.shape)


def subtract_control_variate(rewards: Tensor, control_variate: Tensor, running: Tensor, gamma: float) -> Tensor:
    """Rewards ``[T, E]`` less those of the no-growth baseline, ``[T, E]``: a network that waits on the same instance.

    Every return is reduced by a number that the actions cannot change, a baseline (Williams, 1992) that leaves the
    policy gradient unbiased and removes the variance that both share: a control variate (Greensmith, Bartlett and
    Baxter, 2004). Where an episode ends early, all later rewards of the baseline count at its last step: otherwise it
    would pay to end while the baseline still earns.
    """
    continues = torch.cat((running[1:], torch.zeros_like(running[:1])))
    return rewards - torch.where(continues, control_variate, discount_rewards(control_variate, gamma))
