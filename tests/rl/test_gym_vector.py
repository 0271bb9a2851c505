"""`esper/Growth-v0` as a vector environment: spaces, masks, seeds, resets."""

import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import esper.rl
from esper.engine.observation import list_features
from esper.errors import ConfigError, IllegalActionError, TaskError
from esper.lifecycle.actions import (
    RELEVANT,
    Blend,
    Head,
    Op,
    clear_irrelevant_heads,
    count_choices,
    make_action,
    make_wait_actions,
)
from esper.rl.gym import Arrays, GrowthEnv, GrowthVectorEnv, NextStepGrowth, SameStepGrowth, make_vector
from esper.rl.rewards import MODES
from open_rules import open_rules
from rl.gym_support import RULES, STEPS, assert_same, legal_action, legal_actions, short_episodes
from rl.short import SUITE

__all__ = ["short_episodes"]

pytestmark = pytest.mark.usefixtures("short_episodes")


E, S, K = 3, len(SUITE.sites), len(SUITE.blueprints)
EVERYONE = np.ones(E, np.bool_)
Mode = AutoresetMode


def make(mode: AutoresetMode = Mode.DISABLED, count: int = E, **settings: Any) -> GrowthVectorEnv:
    return make_vector(count, autoreset_mode=mode, **{"rules": RULES, **settings})


def wait_until_the_end(env: GrowthVectorEnv) -> tuple[Any, ...]:
    """The transition in which the episodes end."""
    for _ in range(STEPS - 1):
        assert not env.step(make_wait_actions(env.num_envs))[2].any()
    return env.step(make_wait_actions(env.num_envs))


def rows(arrays: Arrays, chosen: Any) -> Arrays:
    return {name: array[chosen] for name, array in arrays.items()}


@pytest.mark.parametrize("promise", [None, {"every": 2, "first": 1, "examples": 8}], ids=["plain", "with promise"])
def test_spaces_are_finite_and_hold_what_is_observed(promise: dict[str, int] | None) -> None:
    env, lists = make(growth={"promise": promise}), list_features(promise is not None)
    single = env.single_observation_space
    assert set(single) == {"globals", "slots", "blueprints", "action_mask"}
    for name, features in lists._asdict().items():
        box = single[name]
        assert np.isfinite(box.low).all()
        assert np.isfinite(box.high).all()
        for index, feature in enumerate(features):
            assert np.unique(box.low[..., index]).tolist() == [np.float32(feature.low)], feature.name
            assert np.unique(box.high[..., index]).tolist() == [np.float32(feature.high)], feature.name
    assert single["blueprints"].shape == (S, K, lists.spec.blueprints)
    assert single["action_mask"].shape == (sum(count_choices(S, K)),)
    assert env.single_action_space.nvec.tolist() == list(count_choices(S, K))
    assert env.action_space.shape == (E, len(Head))
    rng = np.random.default_rng(0)
    observation, info = env.reset(seed=0)
    for _ in range(STEPS):
        assert env.observation_space.contains(observation)
        observation, rewards, terminated, truncated, info = env.step(legal_actions(env, info, rng))
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
        assert rewards.shape == terminated.shape == truncated.shape == (E,)
        assert not truncated.any(), "the horizon is termination, never truncation"
    assert env.observation_space.contains(observation)
    assert terminated.all()


def legal_by(masks: dict[str, np.ndarray], chosen: np.ndarray) -> bool:
    """Whether one network's conditional masks allow all heads that the operation reads."""
    op, slot = chosen[:2]
    if not masks["op"][op] or (RELEVANT[op, Head.SLOT] and not masks["slot"][op, slot]):
        return False
    given = {**masks, "blueprint": masks["blueprint"][slot], "alpha_target": masks["alpha_target"][slot]}
    others = [head for head in Head if head > Head.SLOT and RELEVANT[op, head]]
    return all(given[head.name.lower()][chosen[head]] for head in others)


def test_an_action_takes_effect_if_and_only_if_the_conditional_masks_allow_it() -> None:
    env = make(rules=open_rules(cooldown=(1, 1, 1), isolation="shadow", min_training_steps=1))
    rng, offsets = np.random.default_rng(0), np.cumsum([0, *count_choices(S, K)[:-1]])
    observation, info = env.reset(seed=0)
    verdicts: list[bool] = []
    ops: set[int] = set()
    for _ in range(STEPS):
        flat = env.action_masks()
        assert np.array_equal(flat, observation["action_mask"])
        chosen = rng.integers(count_choices(S, K), size=(E, len(Head)))
        legal_ones = legal_actions(env, info, rng)
        chosen = np.where(rng.random((E, 1)) < 0.75, legal_ones, chosen)
        before = info["masks"]
        observation, *_, info = env.step(chosen)
        for row in range(E):
            own = {name: mask[row] for name, mask in before.items() if not name.startswith("_")}
            verdicts.append(legal_by(own, chosen[row]))
            expected = clear_irrelevant_heads(chosen)[row] if verdicts[-1] else make_wait_actions(1)[0]
            assert info["action"][row].tolist() == expected.tolist()
            assert info["canonicalised"][row] == (expected != chosen[row]).any()
            assert flat[row][offsets + expected].all()
            ops.add(int(expected[Head.OP]))
    assert len(ops) >= 5
    assert min(verdicts.count(True), verdicts.count(False)) >= 5


@pytest.mark.parametrize(
    ("given", "effective"),
    [
        (make_action(Op.PRUNE, 1), make_wait_actions(1)[0]),
        (make_action(Op.GERMINATE, 1, 2, blend=Blend.GATE), make_wait_actions(1)[0]),
        (np.full(8, 99), make_wait_actions(1)[0]),
        (np.full(8, -1), make_wait_actions(1)[0]),
        (np.array([Op.WAIT, 2, 3, 1, 1, 1, 1, 1]), make_wait_actions(1)[0]),
        (np.array([Op.GERMINATE, 1, 2, 0, 1, 2, 3, 2]), np.array([Op.GERMINATE, 1, 2, 0, 1, 2, 0, 0])),
    ],
)
def test_any_integers_are_made_legal_and_told(given: np.ndarray, effective: np.ndarray) -> None:
    env = make(rules=open_rules())
    env.reset(seed=0)
    legal = make_action(Op.GERMINATE, 0, 1)
    *_, info = env.step(np.stack([legal, given, make_wait_actions(1)[0]]))
    assert info["action"].tolist() == [legal.tolist(), effective.tolist(), make_wait_actions(1)[0].tolist()]
    assert info["canonicalised"].tolist() == [False, True, False]
    assert info["_action"].all()
    assert info["_canonicalised"].all()


@pytest.mark.parametrize(
    "actions",
    [
        make_wait_actions(E).astype(float),
        make_wait_actions(E + 1),
        make_wait_actions(E)[:, :3],
        make_wait_actions(E)[0],
    ],
)
def test_what_is_no_action_array_is_refused_and_changes_nothing(actions: np.ndarray) -> None:
    env, undisturbed = make(), make()
    env.reset(seed=0)
    undisturbed.reset(seed=0)
    with pytest.raises(IllegalActionError, match="integer array of shape"):
        env.step(actions)
    assert_same(env.step(make_wait_actions(E))[0], undisturbed.step(make_wait_actions(E))[0])


def test_rewards_add_up_to_j_and_the_test_score_is_there_to_ask() -> None:
    env = make()
    env.reset(seed=0)
    total = np.zeros(E)
    for _ in range(STEPS):
        total += env.step(env.action_space.sample())[1]
    np.testing.assert_allclose(total, env.episodes.potential, atol=1e-6)
    final = env.final_score()
    assert final.score.shape == final.accuracy.shape == final.added_parameters.shape == (E,)


def test_seeds_decide_everything() -> None:
    env, other = make(), make()
    first, info = env.reset(seed=5)
    again, _ = other.reset(seed=5)
    assert_same(first, again)
    actions = legal_actions(env, info, np.random.default_rng(0))
    assert_same(env.step(actions)[0], other.step(actions)[0])
    assert_same(env.reset()[0], other.reset()[0])
    assert_same(env.reset(seed=5)[0], first)
    different, others = env.reset(seed=6)
    assert others["instance"][:2].tolist() == info["instance"][1:].tolist(), "network i has seed + i"
    assert different["globals"].tolist() != first["globals"].tolist()


def test_a_list_of_seeds_and_a_network_s_own_stream() -> None:
    env, alone = make(), make(count=1)
    names = [env.reset(seed=[7, None, 9])[1]["instance"]]
    own = [alone.reset(seed=9)[1]["instance"]]
    for _ in range(3):
        names.append(env.reset()[1]["instance"])
        own.append(alone.reset()[1]["instance"])
    assert [name[2] for name in names] == [name[0] for name in own]
    assert len({name[2] for name in names}) == 4
    with pytest.raises(ConfigError, match="2 seeds for 3 networks"):
        env.reset(seed=[1, 2])


def test_the_split_and_the_suite_are_the_ones_asked_for() -> None:
    families = {name.split("/")[0] for name in make(split="transfer", count=12).reset(seed=0)[1]["instance"]}
    assert families
    assert families <= set(SUITE.transfer_families)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"reward": "outcom"}, ConfigError, "did you mean 'outcome'"),
        ({"rules": {"cooldown": (0, 1, 1)}}, ConfigError, r"`rules.cooldown\[0\]` is 0"),
        ({"siute": "tokens"}, ConfigError, "did you mean `suite`"),
        ({"count": 0}, ConfigError, "num_envs is 0"),
        *(
            ({"reward": reward}, ConfigError, "intervention_after: an environment does not know how much")
            for mode in MODES
            if "intervention_after" in MODES[mode].weights
            for late in [{"mode": mode, "intervention": 0.5, "intervention_after": 0.9}]
            for reward in (late, ["outcome", late])
        ),
    ],
)
def test_what_cannot_be_made_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**settings)


@pytest.mark.parametrize("reward", ["outcome", "shaped", ["sparse", {"mode": "shaped", "family": "loss"}]])
def test_info_has_the_reward_mode(reward: Any) -> None:
    modes = ["sparse", "shaped"] if isinstance(reward, list) else [reward]
    env, single = make(reward=reward), GrowthEnv(rules=RULES, reward=reward)
    told = [env.reset(seed=0)[1], env.step(make_wait_actions(E))[4]]
    assert [info["reward_mode"].tolist() for info in told] == [[modes[i % len(modes)] for i in range(E)]] * 2
    told = [single.reset(seed=0)[1], single.step(make_wait_actions(1)[0])[4]]
    assert [info["reward_mode"] for info in told] == [modes[0]] * 2


def test_an_unknown_suite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(TaskError, match="tokens"):
        GrowthVectorEnv(1, suite="token")
    with pytest.raises(ConfigError, match="unknown autoreset mode 'Never'"):
        make_vector(1, autoreset_mode="Never")


def test_a_reset_mask_begins_some_episodes_anew_and_leaves_the_others() -> None:
    env, undisturbed = make(), make()
    env.reset(seed=0)
    undisturbed.reset(seed=0)
    mask = np.array([False, True, False])
    for both in (env, undisturbed):
        both.step(np.stack([make_action(Op.GERMINATE, 0, 1), make_wait_actions(1)[0], make_action(Op.GERMINATE, 1, 2)]))
    before = undisturbed.step(make_wait_actions(E))[0]
    env.step(make_wait_actions(E))
    options = {"reset_mask": mask}
    observation, info = env.reset(options=options)
    assert options == {"reset_mask": mask}, "options are the caller's"
    assert_same(rows(observation, ~mask), rows(before, ~mask))
    assert observation["globals"][:, 0].tolist() == pytest.approx([2 / STEPS, 0, 2 / STEPS])
    assert info["_instance"].all()
    for _ in range(STEPS - 2):
        *_, terminated, _, _ = env.step(make_wait_actions(E))
    assert terminated.tolist() == [True, False, True]
    with pytest.raises(ResetNeeded, match=r"episodes \[0, 2\] have ended"):
        env.step(make_wait_actions(E))
    env.reset(options={"reset_mask": ~mask})
    assert env.step(make_wait_actions(E))[2].tolist() == [False, False, False]


def test_a_seed_with_a_reset_mask_reaches_the_masked_only() -> None:
    env, undisturbed, mask = make(), make(), np.array([False, True, False])
    env.reset(seed=0)
    undisturbed.reset(seed=0)
    _, info = env.reset(seed=50, options={"reset_mask": mask})
    assert info["instance"][1] == make(count=1).reset(seed=51)[1]["instance"][0]
    own, expected = (one.reset()[1]["instance"] for one in (env, undisturbed))
    assert own[~mask].tolist() == expected[~mask].tolist()
    assert own[1] != expected[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_mask": np.zeros(E, np.bool_)}, "False everywhere"),
        ({"reset_mask": np.ones(E + 1, np.bool_)}, r"shape \(3,\)"),
        ({"reset_mask": np.ones(E, np.int64)}, "bool array"),
        ({"mask": EVERYONE}, "unknown reset option 'mask'"),
    ],
)
def test_reset_options_are_checked(options: dict[str, Any], message: str) -> None:
    env = make()
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=message):
        env.reset(options=options)


def test_what_was_not_begun_cannot_go_on() -> None:
    env = make()
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        env.step(make_wait_actions(E))
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        _ = env.masks
    with pytest.raises(ResetNeeded, match="reset all networks once"):
        env.reset(options={"reset_mask": np.array([True, False, False])})


@pytest.mark.parametrize("mode", list(Mode))
def test_modes_are_declared_where_gymnasium_looks(mode: AutoresetMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec(esper.rl.ENVIRONMENT, num_envs=2, autoreset_mode=mode.value, rules=RULES)
    assert env.metadata["autoreset_mode"] is mode
    assert env.unwrapped.autoreset_mode is mode
    assert env.num_envs == 2
    assert env.unwrapped.spec.id == "esper/Growth-v0"
    assert json.loads(env.unwrapped.spec.to_json())["kwargs"]["rules"]["cooldown"]
    assert {make_vector(1, autoreset_mode=one).metadata["autoreset_mode"] for one in Mode} == set(Mode)


def staggered(mode: AutoresetMode) -> GrowthVectorEnv:
    """Network 1 is three steps behind the others, and all are about to end or not."""
    env = make(mode)
    env.reset(seed=0)
    for _ in range(3):
        env.step(make_wait_actions(E))
    env.reset(options={"reset_mask": np.array([False, True, False])})
    for _ in range(STEPS - 4):
        env.step(make_wait_actions(E))
    return env


def test_same_step_begins_anew_in_the_step_that_ends() -> None:
    env, core = staggered(Mode.SAME_STEP), staggered(Mode.DISABLED)
    assert isinstance(env, SameStepGrowth)
    ended = np.array([True, False, True])
    expected, rewards, terminated, _, info = core.step(make_wait_actions(E))
    actual, same_rewards, same_terminated, truncated, same_info = env.step(make_wait_actions(E))
    assert terminated.tolist() == same_terminated.tolist() == ended.tolist()
    assert not truncated.any()
    assert same_rewards.tolist() == rewards.tolist()
    for row in np.flatnonzero(ended):
        assert_same(same_info["final_obs"][row], rows(expected, row))
    assert same_info["final_obs"][1] is None
    assert same_info["_final_obs"].tolist() == same_info["_final_info"].tolist() == ended.tolist()
    assert same_info["final_info"]["instance"].tolist() == info["instance"].tolist()
    assert same_info["final_info"]["_action"].tolist() == ended.tolist()
    assert same_info["final_info"]["masks"]["_op"].tolist() == ended.tolist()
    assert same_info["_action"].tolist() == (~ended).tolist()
    fresh, fresh_info = core.reset(options={"reset_mask": ended})
    assert_same(actual, fresh)
    assert same_info["instance"].tolist() == fresh_info["instance"].tolist() != info["instance"].tolist()
    assert_same(env.step(make_wait_actions(E))[0], core.step(make_wait_actions(E))[0])


def test_next_step_begins_anew_in_the_step_after() -> None:
    env, core = staggered(Mode.NEXT_STEP), staggered(Mode.DISABLED)
    assert isinstance(env, NextStepGrowth)
    ended = np.array([True, False, True])
    assert_same(env.step(make_wait_actions(E))[0], core.step(make_wait_actions(E))[0])
    planting = np.stack([make_action(Op.GERMINATE, 0, 1)] * E)
    actual, rewards, terminated, truncated, info = env.step(planting)
    fresh, _ = core.reset(options={"reset_mask": ended})
    assert_same(rows(actual, ended), rows(fresh, ended))
    assert actual["globals"][:, 0].tolist() == pytest.approx([0, (STEPS - 2) / STEPS, 0])
    assert rewards[ended].tolist() == [0.0, 0.0]
    assert rewards[1] != 0.0
    assert not terminated.any()
    assert not truncated.any()
    assert info["_action"].tolist() == (~ended).tolist()
    assert info["action"][1].tolist() == planting[1].tolist()
    # From here on they are as if begun by hand; the other network has grown on.
    assert_same(rows(env.step(make_wait_actions(E))[0], ended), rows(core.step(make_wait_actions(E))[0], ended), 1e-4)


def test_next_step_when_all_end_together() -> None:
    env, core = make(Mode.NEXT_STEP), make()
    env.reset(seed=0)
    core.reset(seed=0)
    assert wait_until_the_end(env)[2].all()
    assert wait_until_the_end(core)[2].all()
    actual, rewards, terminated, _, info = env.step(np.stack([make_action(Op.GERMINATE, 0, 1)] * E))
    assert_same(actual, core.reset()[0])
    assert not rewards.any()
    assert not terminated.any()
    assert not info["_action"].any()
    assert not wait_until_the_end(env)[3].any()


@pytest.mark.parametrize("mode", list(Mode))
def test_gymnasium_s_own_statistics_agree(mode: AutoresetMode) -> None:
    env = RecordEpisodeStatistics(make(mode))
    env.reset(seed=0)
    total = np.zeros(E)
    for _ in range(STEPS):
        _, rewards, _, _, info = env.step(make_wait_actions(E))
        total += rewards
    assert info["_episode"].all()
    np.testing.assert_allclose(info["episode"]["r"], total, atol=1e-6)
    assert info["episode"]["l"].tolist() == [STEPS] * E
    if mode is not Mode.DISABLED:
        env.step(make_wait_actions(E))


def test_importing_esper_imports_neither_torch_nor_gymnasium() -> None:
    script = """
import sys, esper
assert not {"torch", "gymnasium"} & set(sys.modules)
import esper.rl, gymnasium
assert "torch" not in sys.modules, "registering imports no environment"
gymnasium.spec("esper/Growth-v0")
"""
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


FORKS = {
    "AsyncVectorEnv": """
envs = gymnasium.vector.AsyncVectorEnv([make, make], context="fork")
envs.reset(seed=0)
envs.step(envs.action_space.sample())
envs.close()
""",
    "made in the child": """
def play():
    env = make()
    env.reset(seed=0)
    env.step(env.action_space.sample())
child = multiprocessing.get_context("fork").Process(target=play)
child.start()
child.join()
assert child.exitcode == 0
""",
}


@pytest.mark.landing
@pytest.mark.parametrize("way", FORKS)
def test_a_process_forked_after_torch_used_threads_plays(way: str) -> None:
    script = f"""
import gymnasium, multiprocessing, torch
import esper.rl

def make():
    return gymnasium.make(esper.rl.ENVIRONMENT, suite="tokens")

torch.set_num_threads(4)
table = torch.randn(1000, 1000, requires_grad=True)
(table @ table).tanh().sum().backward()
{FORKS[way]}
assert torch.get_num_threads() == 4
"""
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        try:
            assert process.wait(timeout=120) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children, which would wait for ever


# `esper/Growth-v0` as a single environment: Gymnasium's checker passes, and it is row 0 of the vector environment.


def make_single() -> GrowthEnv:
    return GrowthEnv(rules=RULES)


def test_gymnasium_s_checker_has_nothing_to_say_and_its_wrappers_play_an_episode_to_its_end() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(esper.rl.ENVIRONMENT, rules=RULES)
        check_env(env.unwrapped, skip_render_check=False)
        env.action_space.seed(0)
        env.reset(seed=0)
        ends = [env.step(env.action_space.sample())[2:4] for _ in range(STEPS)]
    assert ends == [(False, False)] * (STEPS - 1) + [(True, False)]


def test_it_is_a_view_of_one_network() -> None:
    single, vector, rng = make_single(), GrowthVectorEnv(1, rules=RULES), np.random.default_rng(0)
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


def test_what_is_returned_is_the_caller_s() -> None:
    env, other = make_single(), make_single()
    observation, info = env.reset(seed=0)
    other.reset(seed=0)
    for array in (*observation.values(), *info["masks"].values()):
        array[...] = 0
    planting = make_action(Op.GERMINATE, 0, 1)
    assert_same(env.step(planting)[0], other.step(planting)[0])


# Early ends and rollbacks as the Gymnasium environments show them.


def test_a_rollback_is_told() -> None:
    env = make_vector(E, rules=RULES, growth={"governor": {"max_rollbacks": 0}})
    env.reset(seed=0)
    episodes = env.episodes
    with torch.no_grad():
        episodes.population.host.values[1] = torch.nan
    _, rewards, terminated, _, info = env.step(make_wait_actions(E))
    assert info["rolled_back"].tolist() == terminated.tolist() == [False, True, False]
    assert rewards[1] < rewards[[0, 2]].min()


def test_a_single_environment_has_no_number_of_networks() -> None:
    with pytest.raises(ConfigError, match="num_envs is an argument of GrowthVectorEnv"):
        GrowthEnv(num_envs=2)
