"""Rollouts: complete episodes of E environments that started together, and batches for updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.control.policy import PolicyState, PolicyStep
from esper.engine.observation import MaskTensors, Observation
from esper.errors import EsperError, plural
from esper.lifecycle.actions import Head
from esper.numerics.arrays import iterate_arrays, map_arrays, merge_arrays

SMALLEST = 1e-8
"""Added to deviations and variances that are divided by."""


class RolloutError(EsperError):
    """Data of another shape, type or length than the rollout's."""


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


class _StoredStep(NamedTuple):
    """One step of a rollout, ``[E, ...]``; its fields are the first ones of `Rollout`."""

    observation: Observation
    masks: MaskTensors
    actions: Tensor
    chosen_log_prob: Tensor
    value: Tensor
    reward: Tensor
    running: Tensor


class RolloutBuffer:
    """Collects a rollout step by step and rejects tensors that do not fit."""

    def __init__(self, steps: int, environments: int, state: PolicyState) -> None:
        """A buffer for ``steps`` steps of ``environments`` environments, from the policy's memory ``state``."""
        self._steps = steps
        self._environments = environments
        self._state = state
        self._stored: list[_StoredStep] = []
        _require(state.output.shape[1] == environments, "state", f"{state.output.shape[1]} environments", environments)

    def __len__(self) -> int:
        return len(self._stored)

    def add(
        self, observation: Observation, masks: MaskTensors, step: PolicyStep, reward: Tensor, running: Tensor
    ) -> None:
        """Append a step: observation, masks and decision, ``[E, ...]``, and the reward ``[E]`` that followed.

        ``running``, bool ``[E]``, is False where the episode had ended before this step.
        """
        if len(self._stored) == self._steps:
            raise RolloutError(f"the rollout is full after {plural(self._steps, 'step')}: finish it and start another")
        # Shapes and types of what the policy and the environment returned.
        stored = _StoredStep(observation, masks, step.actions, step.chosen_log_prob, step.value, reward, running)
        scalars, per_head = (self._environments,), (self._environments, len(Head))
        for name, shape, dtype in (
            ("actions", per_head, torch.int64),
            ("chosen_log_prob", per_head, torch.float32),
            ("value", scalars, torch.float32),
            ("reward", scalars, torch.float32),
            ("running", scalars, torch.bool),
        ):
            tensor = getattr(stored, name)
            _require(tensor.shape == shape, name, tuple(tensor.shape), shape)
            _require(tensor.dtype == dtype, name, tensor.dtype, dtype)
        # All steps are like the first one.
        first_stored = self._stored[0] if self._stored else stored
        for (name, tensor), (_, first) in zip(iterate_arrays(stored), iterate_arrays(first_stored), strict=True):
            _require(tensor.shape[:1] == scalars, name, tuple(tensor.shape), (*scalars, "..."))
            _require(tensor.shape == first.shape, name, tuple(tensor.shape), tuple(first.shape))
            _require(tensor.dtype == first.dtype, name, tensor.dtype, first.dtype)
        self._stored.append(map_arrays(Tensor.detach, stored))

    def finish(self, terminated: Tensor, final_value: Tensor) -> Rollout:
        """The rollout, without a no-growth baseline.

        ``final_value [E]`` is used where ``terminated``, bool ``[E]``, is False. An episode that ended before the last
        step has terminated.
        """
        _require(len(self._stored) == self._steps, "rollout", f"{len(self._stored)} steps", f"{self._steps} steps")
        for name, tensor in (("terminated", terminated), ("final_value", final_value)):
            _require(tensor.shape == (self._environments,), name, tuple(tensor.shape), (self._environments,))
        return Rollout(
            *merge_arrays(torch.stack, self._stored),
            # Nothing follows a terminated episode; a cut one goes on, worth what the policy expects of it.
            final_value=final_value.masked_fill(terminated, 0.0),
            state=self._state,
            control_variate=torch.zeros(self._steps, self._environments, device=final_value.device),
        )


def _require(condition: bool, name: str, value: object, expected: object) -> None:
    if not condition:
        raise RolloutError(f"{name} is {value} but must be {expected}")
