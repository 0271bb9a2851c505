"""What a twin earned is taken off the rewards without a change of what is best to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.control.observation import Observation
from esper.control.policy import Policy, PolicySettings
from esper.lifecycle.actions import Head, Op
from esper.rl.objective import Objective
from esper.rl.ppo import Learner
from esper.rl.rollout import Rollout, RolloutBuffer
from esper.rl.twins import minus_twin, to_go
from rl.noise import ENVIRONMENTS, STEPS, ending_early, rollouts
from rl.plain_ppo import plain_ppo
from rl.probes import SPEC, blank_observation, learner, only_ops

GROUP = 4
REWARDS = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=3, max_size=3), min_size=4, max_size=4)


def with_twins(rollout: Rollout, seed: int = 0) -> Rollout:
    """Twins of groups that earn something at random."""
    earned = torch.randn(STEPS, ENVIRONMENTS // GROUP, generator=torch.Generator().manual_seed(seed)) * 5
    return replace(rollout, twin_reward=earned.repeat_interleave(GROUP, 1))


def discounted(rewards: Tensor, gamma: float, start: int, end: int) -> float:
    return sum(gamma ** (step - start) * float(rewards[step]) for step in range(start, end))


@given(REWARDS, REWARDS, st.lists(st.integers(1, 4), min_size=3, max_size=3), st.floats(0.5, 1))
def test_returns_fall_by_what_the_twin_earns_whenever_the_episode_ends(
    paid: list[list[float]], twins: list[list[float]], ends: list[int], gamma: float
) -> None:
    reward, twin_reward = torch.tensor(paid), torch.tensor(twins)
    running = torch.arange(4).unsqueeze(1) < torch.tensor(ends)
    relative = minus_twin(reward, twin_reward, running, gamma)
    for environment, end in enumerate(ends):
        for start in range(end):
            fall = discounted((reward - relative)[:, environment], gamma, start, end)
            assert fall == pytest.approx(discounted(twin_reward[:, environment], gamma, start, 4), abs=1e-3)


def test_what_is_still_to_come_is_discounted() -> None:
    assert to_go(torch.tensor([[1.0], [2.0], [4.0]]), 0.5).flatten().tolist() == [3.0, 4.0, 4.0]


def test_twins_of_groups_leave_the_policy_gradient_alone_and_ease_the_values() -> None:
    settings = plain_ppo(group=GROUP, value_weight=0.0)
    student = learner(settings, sizes=PolicySettings(hidden=32, width=16, head_gain=1.0))
    (rollout,) = rollouts(student, 1)

    def gradient(rollout: Rollout) -> Tensor:
        student.policy.zero_grad()
        Objective(student.policy, settings).backward(student.batch(rollout), torch.zeros(len(Head)))
        return torch.cat([p.grad.flatten() for p in student.policy.parameters() if p.grad is not None])

    alone, beside = gradient(rollout), gradient(with_twins(rollout))
    torch.testing.assert_close(beside, alone, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(student.batch(with_twins(rollout)).target, student.batch(rollout).target)


def every_choice(policy: Policy) -> Rollout:
    """One step in which each of three operations is chosen once, on the same instance, and paid differently."""
    ops = (Op.WAIT, Op.FOSSILIZE, Op.GERMINATE)
    masks, state = only_ops(len(ops), *ops), policy.initial_state(len(ops))
    for part in (masks.slot, masks.blueprint, masks.blend, masks.tempo, masks.alpha_target):
        part[..., 1:] = False
    buffer = RolloutBuffer(1, len(ops), state)
    seen = Observation(*(torch.ones_like(part) for part in blank_observation(len(ops))))
    step = policy.act(seen, masks, state)
    actions = torch.zeros_like(step.actions)
    actions[:, Head.OP] = torch.tensor(ops)
    buffer.add(
        seen,
        masks,
        step._replace(actions=actions),
        torch.tensor([0.3, 2.0, -1.0]),
        torch.ones(len(ops), dtype=torch.bool),
    )
    return buffer.finish(torch.ones(len(ops), dtype=torch.bool), torch.zeros(len(ops)))


def expected_gradient(student: Learner, rollout: Rollout) -> dict[str, Tensor]:
    """The policy gradient, exactly: every choice by its probability."""
    student.policy.zero_grad()
    now = student.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
    probability = now.log_prob.detach().exp()
    assert float(probability.sum()) == pytest.approx(1.0)
    (probability * now.log_prob * student.batch(rollout).advantage).sum().backward()
    return {name: p.grad.clone() for name, p in student.policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("twins", "biased"), [([0.7, 0.7, 0.7], False), ([0.7, 0.0, -0.7], True)])
def test_the_policy_gradient_is_unbiased_unless_twins_knew_the_actions(twins: list[float], biased: bool) -> None:
    policy = Policy(SPEC, PolicySettings(hidden=8, width=8, head_gain=1.0), torch.Generator().manual_seed(0))
    student = Learner(policy, plain_ppo(twin=True), 0)
    rollout = every_choice(policy)
    alone = expected_gradient(student, rollout)
    beside = expected_gradient(student, replace(rollout, twin_reward=torch.tensor([twins])))
    name = "heads.outputs.OP.weight"
    assert float(alone[name].abs().max()) > 1e-3
    assert torch.allclose(beside[name], alone[name], atol=1e-6) is not biased


@pytest.mark.parametrize("early", [False, True])
def test_returns_are_reported_as_they_were_paid(early: bool) -> None:
    settings = plain_ppo(gae_lambda=1.0)
    student = learner(settings)
    (rollout,) = rollouts(student, 1)
    rollout = ending_early(rollout) if early else rollout
    beside = learner(settings).update(with_twins(rollout), 0.0)
    alone = student.update(rollout, 0.0)
    assert beside.return_mean == pytest.approx(alone.return_mean, rel=1e-4)
    assert beside.return_deviation == pytest.approx(alone.return_deviation, rel=1e-4)
    assert beside.value_loss != pytest.approx(alone.value_loss, rel=1e-3)
