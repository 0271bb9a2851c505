"""One number instead of eight choices is complete and exact, and stable_baselines3 learns with it."""

from itertools import product

import numpy as np
import pytest
from numbered_actions import NumberedActions

from esper.lifecycle.actions import Op, clear_irrelevant_heads, count_choices
from esper.lifecycle.rules import ActionMasks, Rules, is_legal
from esper.rl.gym import GrowthVectorEnv
from open_rules import open_rules
from rl.gym_support import STEPS, assert_same, short_episodes
from rl.short import SUITE

pytestmark = [pytest.mark.landing, pytest.mark.usefixtures("short_episodes")]
__all__ = ["short_episodes"]

E = 4
RULES: dict[str, Rules] = {
    "training": Rules(),
    "shadow": open_rules(isolation="shadow", cooldown=(1, 1, 1), min_training_steps=1),
    "every blend": open_rules(cooldown=(1, 1, 1), blends=("add", "gate", "multiply"), alpha_speeds=(0, 8)),
    "unsorted": open_rules(cooldown=(1, 1, 1), operations=("prune", "wait", "germinate"), tempos=(8, 3)),
}


def allowed(masks: ActionMasks, candidates: np.ndarray, row: int) -> set[tuple[int, ...]]:
    """The slow obvious reference: ask the lifecycle about one action after the other."""
    own = masks.rows(slice(row, row + 1))
    return {tuple(one) for one in candidates.tolist() if is_legal(np.array([one]), own)[0]}


@pytest.mark.parametrize("rules", list(RULES))
def test_the_mask_allows_exactly_what_the_lifecycle_does_and_who_keeps_to_it_is_never_overruled(rules: str) -> None:
    env = NumberedActions(E, rules=RULES[rules])
    sizes = count_choices(len(SUITE.sites), len(SUITE.blueprints))
    candidates = np.unique(clear_irrelevant_heads(np.array(list(product(*map(range, sizes))))), axis=0)
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    ops: set[int] = set()
    for step in range(STEPS):
        mask = env.action_masks()
        assert (observation["action_mask"] == mask).all()
        ops |= set(env.table[mask.any(axis=0), 0].tolist())
        if step % 3 == 0:  # the reference is slow
            row = step // 3
            listed = [tuple(one) for one in env.table[mask[row]].tolist()]
            assert len(set(listed)) == len(listed)
            assert set(listed) == allowed(env.masks, candidates, row)
        chosen = np.array([rng.choice(np.flatnonzero(one)) for one in mask])
        observation, *_, info = env.step(chosen)
        assert not info["canonicalised"].any()
        assert (info["action"] == env.table[chosen]).all()
    assert {Op.WAIT, Op.GERMINATE, Op.PRUNE} <= ops


@pytest.mark.parametrize(("rules", "count"), [(Rules(), 28), (open_rules(), 340)])
def test_the_counts_that_the_documentation_gives(rules: Rules, count: int) -> None:
    table = NumberedActions(1, suite="tokens", rules=rules).table
    assert len(table) == count
    assert not table[0].any(), "the first action is to wait"


def test_it_is_the_same_environment() -> None:
    joint, factored = NumberedActions(E), GrowthVectorEnv(E)
    rng = np.random.default_rng(2)
    joint.reset(seed=0)
    factored.reset(seed=0)
    overruled = 0
    for _ in range(STEPS):
        chosen = rng.integers(len(joint.table), size=E)
        seen, reward, ended, _, info = joint.step(chosen)
        expected, same_reward, same_end, _, same_info = factored.step(joint.table[chosen])
        assert_same({**seen, "action_mask": expected["action_mask"]}, expected)
        assert reward.tolist() == same_reward.tolist()
        assert ended.tolist() == same_end.tolist()
        assert info["action"].tolist() == same_info["action"].tolist()
        overruled += int(info["canonicalised"].sum())
    assert overruled, "choices outside the mask become WAIT"


def test_stable_baselines_learns_under_exact_masks_and_episodes_begin_anew() -> None:
    pytest.importorskip("sb3_contrib")
    from sb3 import GrowthVecEnv, flatten  # noqa: PLC0415
    from sb3_contrib import MaskablePPO  # noqa: PLC0415

    env, core = GrowthVecEnv(NumberedActions(E)), NumberedActions(E)
    env.seed(0)
    np.testing.assert_array_equal(env.reset(), flatten(core.reset(seed=0)[0]))
    waiting = np.zeros(E, np.int64)
    for step in range(STEPS):
        seen, rewards, ended, infos = env.step(waiting)
        observation, same, *_ = core.step(waiting)
        np.testing.assert_array_equal(rewards, same.astype(np.float32))
        assert ended.tolist() == [step == STEPS - 1] * E
    np.testing.assert_array_equal(np.stack([told["terminal_observation"] for told in infos]), flatten(observation))
    observation, _ = core.reset(options={"reset_mask": np.ones(E, np.bool_)})
    np.testing.assert_array_equal(seen, flatten(observation))

    model = MaskablePPO("MlpPolicy", env, n_steps=STEPS, batch_size=E * STEPS // 2, n_epochs=2, device="cpu", seed=0)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(2 * E * STEPS)
    buffer = model.rollout_buffer
    assert buffer.action_masks[np.arange(len(buffer.actions)), buffer.actions[:, 0].astype(int)].all()
    assert all(not value.equal(before[name]) for name, value in model.policy.state_dict().items())
