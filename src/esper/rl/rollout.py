"""Whole episodes of E environments that began together, and what an update learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.control.policy import PolicyState, PolicyStep
from esper.engine.observation import MaskTensors, Observation
from esper.errors import EsperError
from esper.lifecycle.actions import Head
from esper.numerics.arrays import iterate_arrays, map_arrays, merge_arrays

SMALLEST = 1e-8
"""Added to deviations and variances that are divided by."""


class RolloutError(EsperError):
    """Data of another shape, type or length than the rollout's."""


class Rollout(NamedTuple):
    """T steps of E environments that began together. Observations are those the policy saw, raw.

    An episode may end before step T; its later steps are there to fill the tensors, and teach nothing.
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
    """float32 ``[T, E]``: what the network's twin earned, which only waited on the same instance; 0 without twins."""

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
        """The same on ``device``."""
        return map_arrays(lambda part: part.to(device), self)


class PPOBatch(NamedTuple):
    """Whole episodes and what to learn from them."""

    rollout: Rollout
    advantage: Tensor
    """``[T, E]``."""
    target: Tensor
    """Returns ``[T, E]``: what the values should have been; less the control variate."""
    is_open: Tensor
    """bool ``[T, E, 8]``: the step is part of the episode and the head had a choice."""


def of_running(batches: Sequence[PPOBatch], of: Callable[[PPOBatch], Tensor]) -> Tensor:
    """Figures ``[T, E]`` of each batch at the steps that belong to its episodes, all in one row."""
    return torch.cat([of(batch)[batch.rollout.running] for batch in batches])


def standardise(batches: Sequence[PPOBatch]) -> list[PPOBatch]:
    """With advantages of mean 0 and deviation 1, over all of them together."""
    counted = of_running(batches, lambda batch: batch.advantage)
    mean, deviation = counted.mean(), counted.std() + SMALLEST
    return [batch._replace(advantage=(batch.advantage - mean) / deviation) for batch in batches]


Episodes = TypeVar("Episodes", Rollout, PPOBatch)
Parts = TypeVar("Parts")


def select_steps(parts: Parts, index: slice | Tensor) -> Parts:
    """Tensors ``[T, E, ...]``, such as observations, at some steps or, by a bool index ``[T, E]``, some decisions."""
    return map_arrays(lambda part: part[index], parts)


def select_environments(episodes: Episodes, index: Tensor) -> Episodes:
    """The whole episodes of the environments at ``index``, int64 ``[n]``."""
    return map_arrays(lambda part: part[index] if part.dim() == 1 else part[:, index], episodes)


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts of equal length as one, environments in order."""
    return merge_arrays(lambda parts: torch.cat(parts, 0 if parts[0].dim() == 1 else 1), rollouts)


def concatenate_alike(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those of equal length, slots and blueprints as one, in the order in which the first of each came."""
    groups: dict[tuple[int, ...], list[Rollout]] = {}
    for rollout in rollouts:
        steps, _, slots, blueprints, _ = rollout.observations.blueprints.shape
        groups.setdefault((steps, slots, blueprints), []).append(rollout)
    return [concatenate(group) for group in groups.values()]


class _StoredStep(NamedTuple):
    """One step of a rollout: its first fields, ``[E, ...]``."""

    observation: Observation
    masks: MaskTensors
    actions: Tensor
    chosen_log_prob: Tensor
    value: Tensor
    reward: Tensor
    running: Tensor


class RolloutBuffer:
    """Collects a rollout step by step and refuses whatever does not fit."""

    def __init__(self, steps: int, environments: int, state: PolicyState) -> None:
        """For ``steps`` steps of ``environments`` environments, from the policy's memory ``state``."""
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
        """Append what the policy saw, might do and did, ``[E, ...]``, and the reward ``[E]`` that followed.

        ``running``, bool ``[E]``, is False where the episode had ended before this step.

        Raises RolloutError if the buffer is full or a tensor's shape or type differs from what it must be.
        """
        if len(self._stored) == self._steps:
            raise RolloutError(f"the rollout is full after {self._steps} steps: finish it and start another")
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
        first = self._stored[0] if self._stored else stored
        for (name, tensor), (_, usual) in zip(iterate_arrays(stored), iterate_arrays(first), strict=True):
            _require(tensor.shape[:1] == scalars, name, tuple(tensor.shape), (*scalars, "..."))
            _require(tensor.shape == usual.shape, name, tuple(tensor.shape), tuple(usual.shape))
            _require(tensor.dtype == usual.dtype, name, tensor.dtype, usual.dtype)
        self._stored.append(map_arrays(Tensor.detach, stored))

    def finish(self, terminated: Tensor, final_value: Tensor) -> Rollout:
        """The rollout, without twins; ``final_value [E]`` is used where ``terminated``, bool ``[E]``, is False.

        An episode that ended before the last step has terminated.

        Raises RolloutError if steps are missing.
        """
        _require(len(self._stored) == self._steps, "rollout", f"{len(self._stored)} steps", f"{self._steps} steps")
        for name, tensor in (("terminated", terminated), ("final_value", final_value)):
            _require(tensor.shape == (self._environments,), name, tuple(tensor.shape), (self._environments,))
        return Rollout(
            *merge_arrays(torch.stack, self._stored),
            final_value=final_value.masked_fill(terminated, 0.0),
            state=self._state,
            control_variate=torch.zeros(self._steps, self._environments, device=final_value.device),
        )


def _require(holds: bool, name: str, found: object, expected: object) -> None:
    if not holds:
        raise RolloutError(f"{name} is {found} but must be {expected}")
