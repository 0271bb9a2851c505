"""Proximal policy optimisation (Schulman et al., 2017) of the recurrent policy, on whole aligned episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.control.policy import Policy
from esper.control.spaces import Observation
from esper.errors import CheckpointError, ConfigError
from esper.lifecycle.actions import Head
from esper.rl.diagnostics import UpdateMetrics
from esper.rl.gae import advantages, minus_group_mean
from esper.rl.losses import clipped_surrogate, entropy_bonus, head_entropies, value_loss
from esper.rl.optimizer import PolicyOptimizer
from esper.rl.rollout import Rollout
from esper.rl.settings import PPOSettings

KL_STOP = 1.5
"""An update ends once the KL divergence exceeds this multiple of its target."""

LONGEST_NAME = 80
"""Of a tensor, in messages: names from a file may be of any length."""

SMALLEST = 1e-8
"""Added to deviations and variances that are divided by."""


class Batch(NamedTuple):
    """Whole episodes and what to learn from them, both ``[T, E]``."""

    rollout: Rollout
    advantage: Tensor
    target: Tensor
    """Returns: what the values should have been."""


class _Measured(NamedTuple):
    """One minibatch's metrics, before its optimizer step: 0-d unless noted."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    deviation: Tensor
    head_entropy: Tensor  # [8]
    head_share: Tensor  # [8]


@dataclass
class _Course:
    """How an update went."""

    measured: list[_Measured] = field(default_factory=list[_Measured])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    steps: int = 0
    stopped: bool = False
    finite: bool = True


class Learner:
    """Owns the policy with its statistics and the optimizer; `state_tensors` is all that is needed to go on."""

    def __init__(self, policy: Policy, settings: PPOSettings, seed: int) -> None:
        """``seed`` and the number of the update decide the order of minibatches. The policy is on its final device."""
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.updates = 0
        self._optimizer = PolicyOptimizer(policy, settings)

    def update(self, rollout: Rollout, progress: float) -> UpdateMetrics:
        """Learn from one rollout at ``progress`` (0 at the start of training, 1 at its end).

        The policy's statistics stand still until all steps are done and then take in the rollout once. If a loss or
        gradient is not finite, that step and the rest are left out and the statistics stay as they are.
        Raises ConfigError if the number of environments does not suit the settings.
        """
        self._check(rollout.environments)
        batch = self.batch(rollout)
        course = self._descend(self._standardised(batch), progress)
        if course.finite:
            running = rollout.running
            seen = Observation(*(part[running] for part in rollout.observations))
            self.policy.recalibrate(seen, batch.target[running])
        self.updates += 1
        return self._report(batch, course, progress)

    def batch(self, rollout: Rollout) -> Batch:
        """The rollout with its advantages, relative to the group where there are groups, and its returns."""
        settings = self.settings
        advantage = advantages(
            rollout.reward,
            rollout.value,
            rollout.final_value,
            rollout.running,
            settings.gamma,
            settings.gae_lambda,
        )
        target = advantage + rollout.value
        if settings.group > 1:
            advantage = minus_group_mean(advantage, settings.group)
        return Batch(rollout, advantage, target)

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
        policy, optimizer = _under("policy.", tensors), _under("optimizer.", tensors)
        expected = {"updates": torch.tensor(self.updates)}
        expected |= {f"policy.{name}": value for name, value in self.policy.state_dict().items()}
        if optimizer:
            expected |= {f"optimizer.{name}": value for name, value in self._optimizer.expected_tensors().items()}
        _check_kinds(tensors, expected)
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

    def _standardised(self, batch: Batch) -> Batch:
        if not self.settings.normalise_advantages:
            return batch
        counted = batch.advantage[batch.rollout.running]
        return batch._replace(advantage=(batch.advantage - counted.mean()) / (counted.std() + SMALLEST))

    def _minibatches(self, environments: int) -> Iterator[Tensor]:
        """Indices of environments, in a new order each epoch: a function of the seed and the update's number."""
        words = np.random.SeedSequence((self.seed, self.updates)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]))
        for _ in range(self.settings.epochs):
            order = torch.randperm(environments, generator=generator).to(self.policy.device)
            yield from order.tensor_split(self.settings.minibatches)

    def _descend(self, batch: Batch, progress: float) -> _Course:
        """All optimizer steps, until the KL divergence or something not finite ends them."""
        settings, course = self.settings, _Course()
        for index in self._minibatches(batch.rollout.environments):
            loss, measured = self._loss(_select(batch, index), settings.entropy_weight(progress))
            course.measured.append(measured)
            course.stopped = measured.kl.item() > KL_STOP * settings.target_kl
            if course.stopped:
                break
            norms = self._optimizer.backward(loss)
            course.norms.append(norms)
            course.finite = bool(norms[-1].isfinite())
            if not course.finite:
                break
            self._optimizer.step(settings.learning_rate_at(progress))
            course.steps += 1
        self._optimizer.clear()
        return course

    def _loss(self, batch: Batch, entropy_weight: float) -> tuple[Tensor, _Measured]:
        rollout = batch.rollout
        now = self.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
        running = rollout.running
        surrogate = clipped_surrogate(
            now.log_prob[running], rollout.log_prob[running], batch.advantage[running], self.settings.clip
        )
        error = value_loss(now.value[running], batch.target[running], self.policy.value_head.scale)
        is_open = now.open & running.unsqueeze(-1)
        per_head = head_entropies(now.entropy, is_open)
        bonus = entropy_bonus(per_head, is_open)
        loss = surrogate.loss + self.settings.value_weight * error - entropy_weight * bonus
        share = is_open[running].to(loss.dtype).mean(0)
        parts = (surrogate.loss, error, bonus, surrogate.kl, surrogate.clipped, surrogate.deviation, per_head, share)
        return loss, _Measured(*(part.detach() for part in parts))

    def _report(self, batch: Batch, course: _Course, progress: float) -> UpdateMetrics:
        seen = _Measured(*(torch.stack(column) for column in zip(*course.measured, strict=True)))
        modules = self._optimizer.module_names
        norms = torch.stack(course.norms).mean(0) if course.norms else torch.zeros(len(modules) + 1)
        running = batch.rollout.running
        value, target = batch.rollout.value[running], batch.target[running]
        explained = 1 - (target - value).var() / (target.var() + SMALLEST)
        heads = tuple(head.name.lower() for head in Head)
        return UpdateMetrics(
            policy_loss=seen.policy_loss.mean().item(),
            value_loss=seen.value_loss.mean().item(),
            entropy=seen.entropy.mean().item(),
            kl=seen.kl.amax().item(),
            clip_fraction=seen.clip_fraction.mean().item(),
            gradient_norm=norms[-1].item(),
            first_ratio_deviation=seen.deviation[0].item(),
            explained_variance=explained.clamp(min=-1).item(),
            return_mean=target.mean().item(),
            return_deviation=target.std().item(),
            advantage_deviation=batch.advantage[running].std().item(),
            learning_rate=self.settings.learning_rate_at(progress),
            entropy_weight=self.settings.entropy_weight(progress),
            optimizer_steps=course.steps,
            stopped_early=course.stopped,
            finite=course.finite,
            head_entropy=_named(heads, seen.head_entropy.mean(0)),
            head_share=_named(heads, seen.head_share.mean(0)),
            module_gradient_norm=_named(modules, norms[:-1]),
        )


def _select(batch: Batch, index: Tensor) -> Batch:
    return Batch(batch.rollout.at(index), batch.advantage[:, index], batch.target[:, index])


def _named(names: tuple[str, ...], numbers: Tensor) -> dict[str, float]:
    return {name: number.item() for name, number in zip(names, numbers, strict=True)}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_kinds(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Names, shapes and types must be the same."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise CheckpointError(f"the learner's checkpoint lacks {name}: it is of another version or policy")
        if name not in expected:
            raise CheckpointError(
                f"the learner's checkpoint holds {name[:LONGEST_NAME]!r}, which this policy has not: use its settings"
            )
        ours, theirs = _kind(expected[name]), _kind(found[name])
        if ours != theirs:
            raise CheckpointError(
                f"the learner's checkpoint holds {name} as {theirs} where this policy has {ours}: "
                "use the settings it was saved with"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
