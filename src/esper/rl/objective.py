"""PPO's loss on a minibatch, and its gradient, computed over one stretch of time after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.control.observation import MaskTensors, Observation
from esper.control.policy import Policy, PolicyEvaluation, PolicyState
from esper.rl.batch import Batch
from esper.rl.losses import (
    drift,
    entropy_bonus,
    factored_surrogate,
    head_means,
    joint_surrogate,
    mean_of_active,
    outside_clip_range,
    value_loss,
)
from esper.rl.rollout import Rollout
from esper.rl.settings import PPOSettings


class Measured(NamedTuple):
    """One minibatch's metrics, before its optimizer step: 0-d unless noted."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    deviation: Tensor
    """Largest |ratio - 1|."""
    head_entropy: Tensor
    """``[8]``."""
    head_share: Tensor
    """``[8]``."""
    head_clip_fraction: Tensor
    """``[8]``."""


class _Counts(NamedTuple):
    """What a minibatch's means divide by."""

    running: Tensor
    """Steps, 0-d."""
    occurrences: Tensor
    """Steps in which each head had a choice, ``[8]``."""


class Objective:
    """Differentiates the loss of one policy by the settings."""

    def __init__(self, policy: Policy, settings: PPOSettings) -> None:
        self._policy = policy
        self._settings = settings
        # Only this function is compiled: the policy itself keeps its parameters' names and acts as before.
        self._evaluate = torch.compile(policy.evaluate) if settings.compile else policy.evaluate

    def backward(self, batch: Batch, entropy_weights: Tensor) -> Measured:
        """Add the gradient of the minibatch's loss to the parameters', freeing each chunk's graph before the next one.

        ``entropy_weights`` are ``[8]``, on the policy's device.
        Chunks hand on their memory but no gradient: truncated backpropagation through time (Williams and Peng, 1990).
        """
        rollout = batch.rollout
        counts = _Counts(rollout.running.sum(), batch.is_open.sum((0, 1)))
        state, measured = rollout.state, list[Measured]()
        for chunk in self._chunks(rollout):
            with torch.autocast(self._policy.device.type, torch.bfloat16, enabled=self._settings.bf16):
                now = _evaluated(self._evaluate, rollout, chunk, state)
            state = now.state.detach()
            loss, part = self._loss(now, batch, chunk, counts, entropy_weights)
            loss.backward()
            measured.append(part)
        return _whole(measured)

    @torch.no_grad()
    def deviation(self, rollout: Rollout) -> Tensor:
        """Largest |ratio - 1|, 0-d, in float32 throughout: what acting and learning do not agree upon."""
        now = _evaluated(self._policy.evaluate, rollout, slice(None), rollout.state)
        return (now.log_prob - rollout.log_prob)[rollout.running].expm1().abs().amax()

    def _chunks(self, rollout: Rollout) -> Iterator[slice]:
        """Consecutive stretches of time, up to the end of the longest episode."""
        length = self._settings.chunk or rollout.steps
        for start in range(0, rollout.steps, length):
            if start and not rollout.running[start].any():
                return
            yield slice(start, start + length)

    def _loss(
        self, now: PolicyEvaluation, batch: Batch, chunk: slice, counts: _Counts, entropy_weights: Tensor
    ) -> tuple[Tensor, Measured]:
        """The chunk's part of the minibatch's loss."""
        rollout, settings = batch.rollout, self._settings
        running, is_open = rollout.running[chunk], batch.is_open[chunk]
        value, target = now.value[running], batch.target[chunk][running]
        surrogate = self._surrogate(now, batch, chunk, counts)
        error = value_loss(value, target, self._policy.value_head.scale, counts.running)
        entropies = head_means(now.entropy, is_open, counts.occurrences)
        bonus = entropy_bonus(entropies, counts.occurrences, entropy_weights)
        loss = surrogate + settings.value_weight * error - bonus
        moved = drift(now.log_prob[running], rollout.log_prob[chunk][running], settings.clip, counts.running)
        outside = outside_clip_range(now.chosen_log_prob, rollout.chosen_log_prob[chunk], settings.clip)
        measured = Measured(
            policy_loss=surrogate,
            value_loss=error,
            entropy=mean_of_active(entropies, counts.occurrences),
            kl=moved.kl,
            clip_fraction=moved.clipped,
            deviation=moved.deviation,
            head_entropy=entropies,
            head_share=is_open.sum((0, 1)) / counts.running,
            head_clip_fraction=head_means(outside, is_open, counts.occurrences),
        )
        return loss, Measured(*(part.detach() for part in measured))

    def _surrogate(self, now: PolicyEvaluation, batch: Batch, chunk: slice, counts: _Counts) -> Tensor:
        """The chunk's part of the policy's loss."""
        rollout, advantage, clip = batch.rollout, batch.advantage[chunk], self._settings.clip
        match self._settings.surrogate:
            case "joint":
                running = rollout.running[chunk]
                old = rollout.log_prob[chunk][running]
                return joint_surrogate(now.log_prob[running], old, advantage[running], clip, counts.running)
            case "factored":
                old, is_open = rollout.chosen_log_prob[chunk], batch.is_open[chunk]
                return factored_surrogate(now.chosen_log_prob, old, advantage, clip, is_open, counts.occurrences)


class _Evaluate(Protocol):
    def __call__(
        self, observations: Observation, masks: MaskTensors, actions: Tensor, state: PolicyState
    ) -> PolicyEvaluation: ...


def _evaluated(evaluate: _Evaluate, rollout: Rollout, chunk: slice, state: PolicyState) -> PolicyEvaluation:
    """What the policy now thinks of a stretch of time that begins with this memory."""
    observations = Observation(*(part[chunk] for part in rollout.observations))
    masks = MaskTensors(*(part[chunk] for part in rollout.masks))
    return evaluate(observations, masks, rollout.actions[chunk], state)


def _whole(parts: list[Measured]) -> Measured:
    """A minibatch's metrics from those of its chunks, whose means have the minibatch's counts."""
    columns = Measured(*(torch.stack(column) for column in zip(*parts, strict=True)))
    return Measured(*(column.sum(0) for column in columns))._replace(deviation=columns.deviation.amax())
