"""Advantages against values worked out by hand and against TorchRL."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.rl.gae import advantages, minus_group_mean

REWARDS = torch.tensor([[1.0], [0.0], [2.0]])
VALUES = torch.tensor([[0.5], [0.4], [0.3]])
RUNNING = torch.ones(3, 1, dtype=torch.bool)


def test_a_terminated_episode_is_worth_nothing_afterwards() -> None:
    found = advantages(REWARDS, VALUES, torch.zeros(1), RUNNING, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.flatten(), torch.tensor([1.64768, 1.094, 1.7]))


def test_a_cut_episode_is_worth_its_last_state() -> None:
    found = advantages(REWARDS, VALUES, torch.tensor([0.6]), RUNNING, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.flatten(), torch.tensor([1.927616, 1.4828, 2.24]))


def test_with_lambda_one_the_advantage_is_return_minus_value() -> None:
    found = advantages(REWARDS, VALUES, torch.zeros(1), RUNNING, gamma=1.0, lam=1.0)
    torch.testing.assert_close(found + VALUES, torch.tensor([[3.0], [2.0], [2.0]]))


def test_with_lambda_zero_it_is_the_one_step_error() -> None:
    found = advantages(REWARDS, VALUES, torch.zeros(1), RUNNING, gamma=1.0, lam=0.0)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.9, -0.1, 1.7]))


@pytest.mark.parametrize("steps", [1, 2])
def test_an_episode_that_ends_early_is_as_one_that_is_shorter(steps: int) -> None:
    running = (torch.arange(3) < steps).unsqueeze(1)
    found = advantages(REWARDS, VALUES, torch.tensor([0.6]), running, gamma=0.9, lam=0.8)
    expected = advantages(REWARDS[:steps], VALUES[:steps], torch.zeros(1), RUNNING[:steps], gamma=0.9, lam=0.8)
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
    found = advantages(rewards, values, final, torch.ones_like(rewards, dtype=torch.bool), 0.97, 0.9)
    torch.testing.assert_close(found, expected[..., 0].T)


def test_group_baseline_is_the_mean_of_the_others_at_the_same_step() -> None:
    found = minus_group_mean(torch.tensor([[1.0, 2.0, 6.0, 10.0, 10.0, 40.0]]), group=3)
    torch.testing.assert_close(found, torch.tensor([[-3.0, -1.5, 4.5, -15.0, -15.0, 30.0]]))


@given(st.integers(2, 5), st.integers(1, 4), st.floats(-50, 50))
def test_group_baseline_removes_what_all_of_a_group_share(group: int, groups: int, shared: float) -> None:
    own = torch.randn(3, group * groups, generator=torch.Generator().manual_seed(group))
    luck = torch.arange(groups).repeat_interleave(group) * shared
    torch.testing.assert_close(minus_group_mean(own + luck, group), minus_group_mean(own, group), atol=1e-3, rtol=1e-4)
