"""Behaviour cloning: a policy that starts as an imitation instead of a random one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from esper.control.policy import Policy
from esper.random_streams import Stream, torch_generator
from esper.rl.advantages import generalised_advantages
from esper.rl.losses import value_loss
from esper.rl.rollout import Rollout, select_environments, select_steps
from esper.settings import Settings


class CloningSettings(Settings):
    """How the policy imitates before it learns by itself."""

    controller: str = "heuristic"
    """The baseline that is imitated."""
    episodes: int = Field(default=128, ge=2, le=100_000)
    """Episodes that it shows, each on a training instance of its own."""
    passes: int = Field(default=30, ge=1, le=10_000)
    """Passes over them."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps per pass."""
    learning_rate: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    value_weight: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Weight of the value function's loss; it learns the demonstrator's returns."""


@dataclass(frozen=True)
class CloningMetrics:
    """How well the policy imitates, in nats: the mean negative log-probability of a demonstrated decision."""

    loss_before: float
    loss_after: float


def clone(policy: Policy, shown: Rollout, settings: CloningSettings, gamma: float, seed: int) -> CloningMetrics:
    """Make the demonstrated actions likely, and the value function foresee the demonstrated returns.

    The policy's statistics take in the demonstrations first, and stand still from then on. ``seed`` decides the order
    of minibatches. The optimizer is dropped afterwards: what follows starts with its own.
    """
    returns = _demonstrated_returns(shown, gamma)
    policy.recalibrate(select_steps(shown.observations, shown.running), returns[shown.running])
    before = _imitation_loss(policy, shown)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    generator = torch_generator(seed, Stream.CLONING_ORDER, bits=32)
    for _ in range(settings.passes):
        order = torch.randperm(shown.environments, generator=generator).to(policy.device)
        for index in order.tensor_split(settings.minibatches):
            part, target = select_environments(shown, index), returns[:, index]
            optimizer.zero_grad()
            _cloning_loss(policy, part, target, settings.value_weight).backward()
            optimizer.step()
    return CloningMetrics(before, _imitation_loss(policy, shown))


def _demonstrated_returns(shown: Rollout, gamma: float) -> Tensor:
    """What was earned from each step on, ``[T, E]``."""
    nothing = torch.zeros_like(shown.reward)
    return generalised_advantages(shown.reward, nothing, shown.final_value, shown.running, gamma, 1.0)


def _cloning_loss(policy: Policy, shown: Rollout, returns: Tensor, value_weight: float) -> Tensor:
    now = policy.evaluate(shown.observations, shown.masks, shown.actions, shown.state)
    running = shown.running
    error = value_loss(now.value[running], returns[running], policy.value_head.scale, running.sum())
    return value_weight * error - now.log_prob[running].mean()


@torch.no_grad()
def _imitation_loss(policy: Policy, shown: Rollout) -> float:
    now = policy.evaluate(shown.observations, shown.masks, shown.actions, shown.state)
    return -now.log_prob[shown.running].mean().item()
