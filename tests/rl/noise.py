"""Rollouts of random features and rewards, for tests of what an update does with them."""

from __future__ import annotations

import torch
from esper.engine.observation import Observation
from torch import Tensor

from esper.rl.ppo import PPO
from esper.rl.rollout import Rollout
from rl.probes import Probe, collect

STEPS, ENVIRONMENTS = 5, 12


class Noise(Probe):
    """Random features and rewards on a scale of their own."""

    def reset(self) -> None:
        pass

    def observe(self, step: int) -> Observation:
        parts = (torch.randn(part.shape, generator=self.random) * 3 + 1 for part in self.blank())
        return Observation(*parts)

    def reward(self, step: int, actions: Tensor) -> Tensor:
        return torch.randn(self.environments, generator=self.random) * 20 + actions[:, 0]


def rollouts(student: PPO, count: int, seed: int = 0) -> list[Rollout]:
    """Rollouts of the policy as it is now."""
    probe = Noise(STEPS, ENVIRONMENTS, seed)
    return [collect(student.policy, probe) for _ in range(count)]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def ending_early(rollout: Rollout) -> Rollout:
    """The same, but environment i's episode is over after i % T + 1 steps."""
    ends = torch.arange(rollout.environments) % rollout.steps + 1
    return rollout._replace(running=torch.arange(rollout.steps).unsqueeze(1) < ends)
