"""Gymnasium environments on short episodes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from esper.lifecycle.actions import Head
from esper.rl.gym import Arrays, GrowthVectorEnv
from rl.short import SUITE

STEPS = SUITE.steps
RULES = {"cooldown": (1, 1, 1)}


@pytest.fixture
def short_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokens` means the short suite."""
    monkeypatch.setattr("esper.rl.gym.get_suite", lambda name: SUITE)


def legal_action(masks: Mapping[str, Any], row: int | None, rng: np.random.Generator) -> np.ndarray:
    """A random legal action ``[8]`` from the conditional masks in ``info``."""
    own = {name: mask if row is None else mask[row] for name, mask in masks.items() if not name.startswith("_")}
    op = rng.choice(np.flatnonzero(own["op"]))
    slot = rng.choice(np.flatnonzero(own["slot"][op]))
    action = np.zeros(len(Head), np.int64)
    action[:2] = op, slot
    from_slot = {Head.BLUEPRINT: own["blueprint"][slot], Head.ALPHA_TARGET: own["alpha_target"][slot]}
    others = {head: own[head.name.lower()] for head in (Head.BLEND, Head.TEMPO, Head.ALPHA_SPEED, Head.ALPHA_CURVE)}
    for head, legal in {**from_slot, **others}.items():
        if legal.any():
            action[head] = rng.choice(np.flatnonzero(legal))
    return action


def legal_actions(env: GrowthVectorEnv, info: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    return np.stack([legal_action(info["masks"], row, rng) for row in range(env.num_envs)])


def assert_same(one: Arrays, other: Arrays, tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        np.testing.assert_allclose(array, other[name], rtol=tolerance, atol=tolerance, err_msg=name)
