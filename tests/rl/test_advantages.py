"""Advantages by hand and against TorchRL; what does not depend on actions is taken off without a bias."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.control.policy import Policy, PolicySettings
from esper.engine.observation import Observation
from esper.lifecycle.actions import Head, Op
from esper.rl.ppo import PPO
from esper.rl.rollout import (
    Rollout,
    RolloutBuffer,
    discount_rewards,
    estimate_advantages,
    subtract_control_variate,
    subtract_group_mean,
)
from rl.probes import ENVIRONMENTS, SPEC, STEPS, blank_observation, ending_early, learner, only_ops, plain_ppo, rollouts

PAID = torch.tensor([[1.0], [0.0], [2.0]])
VALUES = torch.tensor([[0.5], [0.4], [0.3]])
RUNNING = torch.ones(3, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("last", "gamma", "lam", "expected"),
    [
        (0.0, 0.9, 0.8, [1.64768, 1.094, 1.7]),  # the episode has ended, and nothing follows
        (0.6, 0.9, 0.8, [1.927616, 1.4828, 2.24]),  # it was cut, and is worth its last state
        (0.0, 1.0, 1.0, [2.5, 1.6, 1.7]),  # return minus value
        (0.0, 1.0, 0.0, [0.9, -0.1, 1.7]),  # the one-step error
    ],
)
def test_advantages_worked_out_by_hand(last: float, gamma: float, lam: float, expected: list[float]) -> None:
    found = estimate_advantages(PAID, VALUES, torch.tensor([last]), RUNNING, gamma, lam)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("steps", [1, 2])
def test_an_episode_that_ends_early_is_as_one_that_is_shorter(steps: int) -> None:
    running = (torch.arange(3) < steps).unsqueeze(1)
    found = estimate_advantages(PAID, VALUES, torch.tensor([0.6]), running, gamma=0.9, lam=0.8)
    expected = estimate_advantages(PAID[:steps], VALUES[:steps], torch.zeros(1), RUNNING[:steps], gamma=0.9, lam=0.8)
    torch.testing.assert_close(found[:steps], expected)
    assert not found[steps:].any()


def test_torchrl_agrees_on_terminated_and_on_cut_episodes() -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(9, 4, generator=random), torch.randn(9, 4, generator=random)
    last = torch.randn(4, generator=random)
    terminated = torch.tensor([True, False, True, False])
    final = last.masked_fill(terminated, 0.0)

    done, ended = torch.zeros(4, 9, 1, dtype=torch.bool), torch.zeros(4, 9, 1, dtype=torch.bool)
    done[:, -1] = True
    ended[:, -1, 0] = terminated
    following = torch.cat((values[1:], last[None])).T[..., None]
    expected, _ = functional.generalized_advantage_estimate(
        0.97, 0.9, values.T[..., None], following, rewards.T[..., None], done, ended
    )
    found = estimate_advantages(rewards, values, final, torch.ones_like(rewards, dtype=torch.bool), 0.97, 0.9)
    torch.testing.assert_close(found, expected[..., 0].T)


def test_group_baseline_is_the_mean_of_the_others_at_the_same_step() -> None:
    found = subtract_group_mean(torch.tensor([[1.0, 2.0, 6.0, 10.0, 10.0, 40.0]]), group=3)
    torch.testing.assert_close(found, torch.tensor([[-3.0, -1.5, 4.5, -15.0, -15.0, 30.0]]))


@given(st.integers(2, 5), st.integers(1, 4), st.floats(-50, 50))
def test_group_baseline_removes_what_all_of_a_group_share(group: int, groups: int, shared: float) -> None:
    own = torch.randn(3, group * groups, generator=torch.Generator().manual_seed(group))
    luck = torch.arange(groups).repeat_interleave(group) * shared
    torch.testing.assert_close(
        subtract_group_mean(own + luck, group), subtract_group_mean(own, group), atol=1e-3, rtol=1e-4
    )


GROUP = 4
REWARDS = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=3, max_size=3), min_size=4, max_size=4)


def with_twins(rollout: Rollout, seed: int = 0) -> Rollout:
    """Twins of groups that earn something at random."""
    earned = torch.randn(STEPS, ENVIRONMENTS // GROUP, generator=torch.Generator().manual_seed(seed)) * 5
    return rollout._replace(control_variate=earned.repeat_interleave(GROUP, 1))


def discounted(rewards: Tensor, gamma: float, start: int, end: int) -> float:
    return sum(gamma ** (step - start) * float(rewards[step]) for step in range(start, end))


@given(REWARDS, REWARDS, st.lists(st.integers(1, 4), min_size=3, max_size=3), st.floats(0.5, 1))
def test_returns_fall_by_what_the_twin_earns_whenever_the_episode_ends(
    paid: list[list[float]], twins: list[list[float]], ends: list[int], gamma: float
) -> None:
    reward, earned = torch.tensor(paid), torch.tensor(twins)
    running = torch.arange(4).unsqueeze(1) < torch.tensor(ends)
    relative = subtract_control_variate(reward, earned, running, gamma)
    for environment, end in enumerate(ends):
        for start in range(end):
            fall = discounted((reward - relative)[:, environment], gamma, start, end)
            assert fall == pytest.approx(discounted(earned[:, environment], gamma, start, 4), abs=1e-3)


def test_what_is_still_to_come_is_discounted() -> None:
    assert discount_rewards(torch.tensor([[1.0], [2.0], [4.0]]), 0.5).flatten().tolist() == [3.0, 4.0, 4.0]


def test_twins_of_groups_leave_the_policy_gradient_alone_and_ease_the_values() -> None:
    settings = plain_ppo(group=GROUP, value_weight=0.0)
    student = learner(settings, sizes=PolicySettings(advice=None, hidden=32, width=16, head_gain=1.0))
    (rollout,) = rollouts(student, 1)

    def gradient(rollout: Rollout) -> Tensor:
        student.policy.zero_grad()
        PPO(student.policy, settings, 0).backward([student.make_batch(rollout)], torch.zeros(len(Head)))
        return torch.cat([p.grad.flatten() for p in student.policy.parameters() if p.grad is not None])

    alone, beside = gradient(rollout), gradient(with_twins(rollout))
    torch.testing.assert_close(beside, alone, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(student.make_batch(with_twins(rollout)).target, student.make_batch(rollout).target)


def every_choice(policy: Policy) -> Rollout:
    """One step in which each of three operations is chosen once, on the same instance, and paid differently."""
    ops = (Op.WAIT, Op.FOSSILIZE, Op.GERMINATE)
    masks, state = only_ops(len(ops), *ops), policy.initial_state(len(ops))
    for part in (masks.slot, masks.blueprint, masks.blend, masks.tempo, masks.alpha_target):
        part[..., 1:] = False
    buffer = RolloutBuffer(state)
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


def expected_gradient(student: PPO, rollout: Rollout) -> dict[str, Tensor]:
    """The policy gradient, exactly: every choice by its probability."""
    student.policy.zero_grad()
    now = student.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
    probability = now.log_prob.detach().exp()
    assert float(probability.sum()) == pytest.approx(1.0)
    (probability * now.log_prob * student.make_batch(rollout).advantage).sum().backward()
    return {name: p.grad.clone() for name, p in student.policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("twins", "biased"), [([0.7, 0.7, 0.7], False), ([0.7, 0.0, -0.7], True)])
def test_the_policy_gradient_is_unbiased_unless_twins_knew_the_actions(twins: list[float], biased: bool) -> None:
    policy = Policy(
        SPEC, PolicySettings(advice=None, hidden=8, width=8, head_gain=1.0), torch.Generator().manual_seed(0)
    )
    student = PPO(policy, plain_ppo(no_growth_baseline=True), 0)
    rollout = every_choice(policy)
    alone = expected_gradient(student, rollout)
    beside = expected_gradient(student, rollout._replace(control_variate=torch.tensor([twins])))
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
    assert beside["return_mean"] == pytest.approx(alone["return_mean"], rel=1e-4)
    assert beside["return_deviation"] == pytest.approx(alone["return_deviation"], rel=1e-4)
    assert beside["value_loss"] != pytest.approx(alone["value_loss"], rel=1e-3)
