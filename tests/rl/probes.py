"""Tiny environments, each solvable only by a learner that has one particular ability."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from control.situations import NO_PRIOR
from esper.control.policy import Policy, PolicySettings
from esper.engine.observation import MaskTensors, Observation, ObservationSpec
from esper.lifecycle.actions import Head, Op, count_choices
from esper.rl.ppo import PPO, Figures, PPOSettings
from esper.rl.rollout import Rollout, RolloutBuffer

SPEC = ObservationSpec(globals=3, slots=2, blueprints=2)
SIZES = PolicySettings(advice=None, hidden=32, width=16, op_prior=NO_PRIOR)
SLOTS, BLUEPRINTS = 2, 3


class Probe(ABC):
    """E episodes of T steps, all random draws from one generator."""

    def __init__(self, steps: int, environments: int, seed: int = 0) -> None:
        self.steps = steps
        self.environments = environments
        self.random = torch.Generator().manual_seed(seed)

    @abstractmethod
    def reset(self) -> None:
        """Draw what this episode is about."""

    @abstractmethod
    def observe(self, step: int) -> Observation:
        """Features ``[E, ...]``."""

    @abstractmethod
    def reward(self, step: int, actions: Tensor) -> Tensor:
        """``[E]``."""

    def masks(self, step: int) -> MaskTensors:
        """All operations and choices, unless a probe forbids some."""
        return free_masks(self.environments)

    def coin(self) -> Tensor:
        """``[E]`` of -1 or 1."""
        return torch.randint(2, (self.environments,), generator=self.random) * 2.0 - 1.0

    def blank(self) -> Observation:
        return blank_observation(self.environments)


def blank_observation(environments: int) -> Observation:
    return Observation(
        torch.zeros(environments, SPEC.globals),
        torch.zeros(environments, SLOTS, SPEC.slots),
        torch.zeros(environments, SLOTS, BLUEPRINTS, SPEC.blueprints),
    )


def free_masks(environments: int) -> MaskTensors:
    _, slots, blueprints, blend, tempo, target, speed, curve = count_choices(SLOTS, BLUEPRINTS)
    shapes = (
        (len(Op),),
        (len(Op), slots),
        (slots, blueprints),
        (blend,),
        (tempo,),
        (slots, target),
        (speed,),
        (curve,),
    )
    masks = MaskTensors(*(torch.ones(environments, *shape, dtype=torch.bool) for shape in shapes))
    masks.slot[:, Op.WAIT, 1:] = False
    return masks


def only_ops(environments: int, *ops: Op) -> MaskTensors:
    masks = free_masks(environments)
    allowed = torch.zeros_like(masks.op)
    allowed[:, list(ops)] = True
    return masks._replace(op=allowed)


def collect(policy: Policy, probe: Probe, greedy: bool = False) -> Rollout:
    """Play one rollout to its end."""
    probe.reset()
    state = policy.initial_state(probe.environments)
    buffer = RolloutBuffer(state)
    for t in range(probe.steps):
        observation, masks = probe.observe(t), probe.masks(t)
        noise = None if greedy else torch.rand(probe.environments, len(Head), generator=probe.random)
        step = policy.act(observation, masks, state, noise)
        state = step.state
        reward = probe.reward(t, step.actions)
        buffer.add(observation, masks, step, reward, torch.ones_like(reward, dtype=torch.bool))
    finished = torch.ones(probe.environments, dtype=torch.bool)
    return buffer.finish(finished, torch.zeros(probe.environments))


def learner(settings: PPOSettings, seed: int = 0, sizes: PolicySettings = SIZES) -> PPO:
    return PPO(Policy(SPEC, sizes, torch.Generator().manual_seed(seed)), settings, seed)


def train(student: PPO, probe: Probe, updates: int) -> Iterator[Figures]:
    """Learn; yields the metrics of every update."""
    for update in range(updates):
        yield student.update(collect(student.policy, probe), update / updates)


def score(student: PPO, probe: Probe) -> float:
    """Mean return of greedy play."""
    return float(collect(student.policy, probe, greedy=True).reward.sum(0).mean())


# Rollouts of random features and rewards, for tests of what an update does with them.


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


# PPO with which the tests of learning were calibrated: no groups, and moderate rates.


_PLAIN: dict[str, Any] = {
    "gae_lambda": 0.95,
    "group": 1,
    "epochs": 4,
    "entropy_start": 0.05,
    "entropy_floor": 0.01,
    "learning_rate": 1e-3,
    "final_learning_rate": 2e-4,
}


def plain_ppo(**changes: Any) -> PPOSettings:
    """Those settings, with changes."""
    return PPOSettings(**{**_PLAIN, **changes})
