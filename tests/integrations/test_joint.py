"""One choice instead of eight: complete, exact, and the same environment underneath."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from esper.errors import IllegalActionError
from esper.integrations.joint import JointActions, JointVectorEnv
from esper.lifecycle.actions import Op, clear_irrelevant_heads, count_choices
from esper.lifecycle.legality import ActionMasks, is_legal
from esper.lifecycle.rules import Rules
from esper.rl.gym import GrowthVectorEnv
from esper.tasks.registry import get_suite
from open_rules import open_rules
from rl.gym_support import STEPS, assert_same, short_episodes
from rl.short import SUITE

pytestmark = [pytest.mark.landing, pytest.mark.usefixtures("short_episodes")]
__all__ = ["short_episodes"]

E = 4
RULES: dict[str, dict[str, Any]] = {
    "training": Rules().model_dump(),
    "shadow": open_rules(isolation="shadow", cooldown=(1, 1, 1), min_training_steps=1).model_dump(),
    "every blend": open_rules(cooldown=(1, 1, 1), blends=("add", "gate", "multiply"), alpha_speeds=(0, 8)).model_dump(),
    "unsorted": open_rules(cooldown=(1, 1, 1), operations=("prune", "wait", "germinate"), tempos=(8, 3)).model_dump(),
}


def every_canonical_action() -> np.ndarray:
    """All combinations of all heads, whatever the rules, with irrelevant heads at 0."""
    sizes = count_choices(len(SUITE.sites), len(SUITE.blueprints))
    return np.unique(clear_irrelevant_heads(np.array(list(product(*map(range, sizes))))), axis=0)


def allowed(masks: ActionMasks, candidates: np.ndarray, row: int) -> set[tuple[int, ...]]:
    """The slow obvious reference: ask the lifecycle about one action after the other."""
    own = masks.rows(slice(row, row + 1))
    return {tuple(one) for one in candidates.tolist() if is_legal(np.array([one]), own)[0]}


@pytest.mark.parametrize("rules", list(RULES))
def test_the_mask_allows_exactly_what_the_lifecycle_does(rules: str) -> None:
    env = JointVectorEnv(E, rules=RULES[rules])
    rng, candidates = np.random.default_rng(0), every_canonical_action()
    env.reset(seed=0)
    ops: set[int] = set()
    for step in range(STEPS):
        mask = env.action_masks()
        ops |= set(env.actions.table[mask.any(axis=0), 0].tolist())
        if step % 3 == 0:  # the reference is slow
            row = step // 3
            listed = [tuple(one) for one in env.actions.table[mask[row]].tolist()]
            assert len(set(listed)) == len(listed)
            assert set(listed) == allowed(env.growth.masks, candidates, row)
        env.step(np.array([rng.choice(np.flatnonzero(one)) for one in mask]))
    assert {Op.WAIT, Op.GERMINATE, Op.PRUNE} <= ops


@pytest.mark.parametrize(("rules", "count"), [(Rules(), 28), (open_rules(), 340)])
def test_the_counts_that_the_documentation_gives(rules: Rules, count: int) -> None:
    actions = JointActions.of(get_suite("tokens"), rules)
    assert len(actions) == count
    assert not actions.table[0].any(), "the first action is to wait"


@pytest.mark.parametrize("rules", list(RULES))
def test_who_keeps_to_the_mask_is_never_overruled(rules: str) -> None:
    env = JointVectorEnv(E, rules=RULES[rules])
    rng = np.random.default_rng(1)
    observation, _ = env.reset(seed=0)
    for _ in range(STEPS):
        assert env.observation_space.contains(observation)
        mask = observation["action_mask"]
        assert (mask == env.action_masks()).all()
        chosen = np.array([rng.choice(np.flatnonzero(one)) for one in mask])
        observation, *_, info = env.step(chosen)
        assert not info["canonicalised"].any()
        assert (info["action"] == env.actions.table[chosen]).all()


def test_it_is_the_same_environment() -> None:
    joint, factored = JointVectorEnv(E), GrowthVectorEnv(E)
    rng = np.random.default_rng(2)
    joint.reset(seed=0)
    factored.reset(seed=0)
    overruled = 0
    for _ in range(STEPS):
        chosen = rng.integers(len(joint.actions), size=E)
        seen, reward, ended, _, info = joint.step(chosen)
        expected, same_reward, same_end, _, same_info = factored.step(joint.actions.table[chosen])
        assert_same({**seen, "action_mask": expected["action_mask"]}, expected)
        assert reward.tolist() == same_reward.tolist()
        assert ended.tolist() == same_end.tolist()
        assert info["action"].tolist() == same_info["action"].tolist()
        overruled += int(info["canonicalised"].sum())
    assert overruled, "choices outside the mask become WAIT"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (np.array([0, -1, 0, 0]), "0 to 27, not"),
        (np.array([0, 28, 0, 0]), "0 to 27, not"),
        (np.zeros(E), "float64 of shape"),
        (np.zeros((E, 8), np.int64), r"int64 of shape \(4, 8\)"),
        (np.zeros(E - 1, np.int64), r"shape \(4, 8\)"),
    ],
)
def test_numbers_of_no_action_are_refused(chosen: np.ndarray, message: str) -> None:
    env = JointVectorEnv(E)
    env.reset(seed=0)
    with pytest.raises(IllegalActionError, match=message):
        env.step(chosen)
