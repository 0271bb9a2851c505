"""Reward modes are what their formulas say, and are found by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import ConfigError
from esper.rl.rewards import REWARD_MODES, Outcome, get_reward_mode, outcome, potential, sparse

Trace = list[float]


def rewards_of(mode: str, trace: Trace) -> list[float]:
    """Rewards of an episode whose potential takes these values, from 0 before the first step."""
    rewards: list[float] = []
    before = 0.0
    for step, value in enumerate(trace):
        finished = np.array([step == len(trace) - 1])
        rewards.append(float(get_reward_mode(mode)(Outcome(np.array([value]), np.array([before]), finished))[0]))
        before = value
    return rewards


@pytest.mark.parametrize("mode", REWARD_MODES)
@given(trace=st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_an_episode_s_rewards_add_up_to_its_outcome(mode: str, trace: Trace) -> None:
    assert sum(rewards_of(mode, trace)) == pytest.approx(trace[-1], abs=1e-12)


def test_outcome_is_the_change_and_sparse_comes_last() -> None:
    trace = [0.25, 0.75, 0.5]
    assert rewards_of("outcome", trace) == [0.25, 0.5, -0.25]
    assert rewards_of("sparse", trace) == [0.0, 0.0, 0.5]


def test_networks_are_rewarded_apart() -> None:
    step = Outcome(np.array([0.5, 0.2]), np.array([0.1, 0.4]), np.array([True, False]))
    np.testing.assert_allclose(outcome(step), [0.4, -0.2])
    np.testing.assert_allclose(sparse(step), [0.5, 0.0])


def test_the_potential_is_accuracy_less_rent() -> None:
    added, host, rent = np.array([0.0, 100.0]), np.array([50.0, 50.0]), np.array([0.1, 0.1])
    np.testing.assert_allclose(potential(np.array([0.9, 0.9]), added, host, rent), [0.9, 0.9 - 0.1 * np.log(3)])


def test_an_unknown_mode_is_refused_with_a_near_name() -> None:
    with pytest.raises(ConfigError, match="unknown reward mode 'outcom', did you mean 'outcome'"):
        get_reward_mode("outcom")
