"""`esper/Growth-v0` as a single environment: Gymnasium's checker passes, and it is row 0 of the vector environment."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import esper.rl
from esper.errors import ConfigError, IllegalActionError
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.rl.gym import GrowthEnv, GrowthVectorEnv
from rl.gym_support import RULES, STEPS, assert_same, legal_action, short_episodes

pytestmark = pytest.mark.usefixtures("short_episodes")
__all__ = ["short_episodes"]


def make() -> GrowthEnv:
    return GrowthEnv(rules=RULES)


def test_gymnasium_s_checker_has_nothing_to_say() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(esper.rl.ENVIRONMENT, rules=RULES)
        check_env(env.unwrapped, skip_render_check=False)


def test_gymnasium_s_wrappers_let_an_episode_run_to_its_end() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(esper.rl.ENVIRONMENT, rules=RULES)
        env.action_space.seed(0)
        env.reset(seed=0)
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(STEPS)]
    assert ends == [(False, False)] * (STEPS - 1) + [(True, False)]


def test_it_is_a_view_of_one_network() -> None:
    single, vector, rng = make(), GrowthVectorEnv(1, rules=RULES), np.random.default_rng(0)
    for seed in (3, None):
        observation, info = single.reset(seed=seed)
        batched, batched_info = vector.reset(seed=seed)
        ops: set[int] = set()
        for _ in range(STEPS):
            assert_same(observation, {name: array[0] for name, array in batched.items()})
            assert info["instance"] == batched_info["instance"][0]
            for name, mask in info["masks"].items():
                assert np.array_equal(mask, batched_info["masks"][name][0])
            assert np.array_equal(single.action_masks(), vector.action_masks()[0])
            chosen = legal_action(info["masks"], None, rng)
            observation, reward, terminated, truncated, info = single.step(chosen)
            batched, rewards, terminations, _, batched_info = vector.step(chosen[None])
            assert (reward, terminated, truncated) == (rewards[0], terminations[0], False)
            assert info["action"].tolist() == batched_info["action"][0].tolist()
            ops.add(int(info["action"][0]))
        assert terminated
        assert len(ops) >= 3
        assert single.final_score() == vector.final_score().score[0]


def test_illegal_actions_become_wait_and_are_told() -> None:
    env = make()
    env.reset(seed=0)
    *_, info = env.step(make_action(Op.PRUNE, 1))
    assert info["action"].tolist() == make_wait_actions(1)[0].tolist()
    assert info["canonicalised"] is True
    *_, info = env.step(make_action(Op.GERMINATE, 1, 2))
    assert info["action"].tolist() == make_action(Op.GERMINATE, 1, 2).tolist()
    assert info["canonicalised"] is False
    with pytest.raises(IllegalActionError, match="integer array"):
        env.step(np.zeros(8))


def test_an_episode_must_be_begun_and_ends() -> None:
    env = make()
    with pytest.raises(ResetNeeded):
        env.step(make_wait_actions(1)[0])
    env.reset(seed=0)
    for _ in range(STEPS):
        env.step(make_wait_actions(1)[0])
    with pytest.raises(ResetNeeded):
        env.step(make_wait_actions(1)[0])
    with pytest.raises(ConfigError, match="unknown reset option 'mask'"):
        env.reset(options={"mask": True})


def test_what_is_returned_is_the_caller_s() -> None:
    env, other = make(), make()
    observation, info = env.reset(seed=0)
    other.reset(seed=0)
    for array in (*observation.values(), *info["masks"].values()):
        array[...] = 0
    planting = make_action(Op.GERMINATE, 0, 1)
    assert_same(env.step(planting)[0], other.step(planting)[0])
