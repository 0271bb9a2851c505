"""Whole episodes of E environments that began together, as an update needs them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.control.observation import MaskTensors, Observation
from esper.control.policy import PolicyState, PolicyStep
from esper.errors import EsperError
from esper.lifecycle.actions import Head


class RolloutError(EsperError):
    """Data of another shape, type or length than the rollout's."""


@dataclass(frozen=True)
class Rollout:
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
    """The policy's memory before the first step."""
    twin_reward: Tensor
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
        return Rollout(
            self.observations.to(device),
            self.masks.to(device),
            self.actions.to(device),
            self.chosen_log_prob.to(device),
            self.value.to(device),
            self.reward.to(device),
            self.running.to(device),
            self.final_value.to(device),
            self.state.to(device),
            self.twin_reward.to(device),
        )

    def at(self, index: Tensor) -> Rollout:
        """The whole episodes of the environments at ``index`` (int64 ``[n]``)."""
        return Rollout(
            Observation(*(part[:, index] for part in self.observations)),
            MaskTensors(*(part[:, index] for part in self.masks)),
            self.actions[:, index],
            self.chosen_log_prob[:, index],
            self.value[:, index],
            self.reward[:, index],
            self.running[:, index],
            self.final_value[index],
            self.state.rows(index),
            self.twin_reward[:, index],
        )


class RolloutBuffer:
    """Collects a rollout step by step and refuses whatever does not fit."""

    def __init__(self, steps: int, environments: int, state: PolicyState) -> None:
        """For ``steps`` steps of ``environments`` environments, from the policy's memory ``state``."""
        self._steps = steps
        self._environments = environments
        self._state = state
        self._rows: list[tuple[Tensor, ...]] = []
        _require(state.output.shape[1] == environments, "state", f"{state.output.shape[1]} environments", environments)

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, observation: Observation, masks: MaskTensors, step: PolicyStep, reward: Tensor, running: Tensor
    ) -> None:
        """Append what the policy saw, might do and did, ``[E, ...]``, and the reward ``[E]`` that followed.

        ``running``, bool ``[E]``, is False where the episode had ended before this step.

        Raises RolloutError if the buffer is full or a tensor's shape or type differs from what it must be.
        """
        if len(self._rows) == self._steps:
            raise RolloutError(f"the rollout is full after {self._steps} steps: finish it and start another")
        row = (*observation, *masks, step.actions, step.chosen_log_prob, step.value, reward, running)
        scalars, per_head = (self._environments,), (self._environments, len(Head))
        _require(step.actions.shape == per_head, "actions", tuple(step.actions.shape), per_head)
        for name, tensor, shape in (
            ("chosen_log_prob", step.chosen_log_prob, per_head),
            ("value", step.value, scalars),
            ("reward", reward, scalars),
        ):
            _require(tensor.shape == shape, name, tuple(tensor.shape), shape)
            _require(tensor.dtype == torch.float32, name, tensor.dtype, torch.float32)
        _require(running.dtype == torch.bool, "running", running.dtype, torch.bool)
        for name, tensor, first in zip(_NAMES, row, self._rows[0] if self._rows else row, strict=True):
            _require(tensor.shape[:1] == scalars, name, tuple(tensor.shape), (*scalars, "..."))
            _require(tensor.shape == first.shape, name, tuple(tensor.shape), tuple(first.shape))
            _require(tensor.dtype == first.dtype, name, tensor.dtype, first.dtype)
        self._rows.append(tuple(tensor.detach() for tensor in row))

    def finish(self, terminated: Tensor, final_value: Tensor) -> Rollout:
        """The rollout, without twins; ``final_value [E]`` is used where ``terminated``, bool ``[E]``, is False.

        An episode that ended before the last step has terminated.

        Raises RolloutError if steps are missing.
        """
        _require(len(self._rows) == self._steps, "rollout", f"{len(self._rows)} steps", f"{self._steps} steps")
        for name, tensor in (("terminated", terminated), ("final_value", final_value)):
            _require(tensor.shape == (self._environments,), name, tuple(tensor.shape), (self._environments,))
        columns = [torch.stack(column) for column in zip(*self._rows, strict=True)]
        observation_parts, mask_parts = len(Observation._fields), len(MaskTensors._fields)
        return Rollout(
            Observation(*columns[:observation_parts]),
            MaskTensors(*columns[observation_parts : observation_parts + mask_parts]),
            *columns[observation_parts + mask_parts :],
            final_value=final_value.masked_fill(terminated, 0.0),
            state=self._state,
            twin_reward=torch.zeros(self._steps, self._environments, device=final_value.device),
        )


_NAMES = (
    *(f"observation.{name}" for name in Observation._fields),
    *(f"masks.{name}" for name in MaskTensors._fields),
    *(field.name for field in fields(Rollout)[2:7]),
)


def _require(holds: bool, name: str, found: object, expected: object) -> None:
    if not holds:
        raise RolloutError(f"{name} is {found} but must be {expected}")
