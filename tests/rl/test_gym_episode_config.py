"""Early ends and rollbacks as the Gymnasium face tells them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from esper.engine.observation import SLOT_FEATURES
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.rl.gym import GrowthVectorEnv, make_vector
from rl.gym_support import RULES, STEPS, short_episodes

__all__ = ["short_episodes"]

E = 3
pytestmark = pytest.mark.usefixtures("short_episodes")


def make(**settings: Any) -> GrowthVectorEnv:
    return make_vector(E, **{"rules": RULES, **settings})


def test_an_episode_may_end_on_a_plateau() -> None:
    env = make(conduct={"plateau": 1, "governor": None})
    _, info = env.reset(seed=0)
    ended = np.zeros(E, np.bool_)
    for _ in range(STEPS):
        _, _, terminated, truncated, info = env.step(make_wait_actions(E))
        assert not truncated.any()
        ended |= terminated
        if terminated.any():
            break
    assert ended.any()
    assert not info["rolled_back"].any()
    assert (env.growth.episodes.finished == ended).all()
    _, info = env.reset(options={"reset_mask": ended})
    assert not env.growth.episodes.finished.any()


def test_counterfactuals_may_take_turns() -> None:
    env = make(conduct={"counterfactual_every": 3, "governor": None})
    env.reset(seed=0)
    age = [feature.name for feature in SLOT_FEATURES].index("evidence_age")
    seen = []
    for step in range(4):
        observation, *_ = env.step(np.stack([make_action(Op.WAIT) if step else make_action(Op.GERMINATE, 0, 0)] * E))
        seen.append(np.rint(observation["slots"][:, 0, age] * STEPS).astype(int).tolist())
    assert seen == [[0] * E, [1] * E, [2] * E, [0] * E]


def test_a_rollback_is_told() -> None:
    env = make(conduct={"governor": {"max_rollbacks": 0}})
    env.reset(seed=0)
    episodes = env.growth.episodes
    with torch.no_grad():
        episodes.population.host.values[1] = torch.nan
    _, rewards, terminated, _, info = env.step(make_wait_actions(E))
    assert info["rolled_back"].tolist() == terminated.tolist() == [False, True, False]
    assert rewards[1] < rewards[[0, 2]].min()
