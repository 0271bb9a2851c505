"""stable_baselines3's algorithms on growth: the adapter tells the truth, and they learn on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from esper.errors import ConfigError
from esper.integrations.joint import JointVectorEnv
from esper.integrations.sb3 import GrowthVecEnv, ModelController, flatten_observations
from esper.lifecycle.rules import Rules
from esper.rl.gym import GrowthVectorEnv, make_vector
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from train.short_suite import ShortSuite, short_suite

E = 4
STEPS = ShortSuite.steps
VIEWS = [GrowthVectorEnv, JointVectorEnv]
SETTINGS: dict[str, Any] = {"suite": "short", "rules": Rules()}
ROLLOUT: dict[str, Any] = {"n_steps": STEPS, "batch_size": E * STEPS // 2, "n_epochs": 2, "gamma": 1.0, "device": "cpu"}


@pytest.fixture(autouse=True)
def _short() -> Iterator[None]:
    with short_suite():
        yield


def joint(count: int = E) -> JointVectorEnv:
    return JointVectorEnv(count, **SETTINGS)


class Recorder(BaseCallback):
    """Keeps what every step of a rollout was decided by, and what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.steps.append({name: self.locals.get(name) for name in ("obs_tensor", "action_masks", "actions", "infos")})
        return True


def learned(model: MaskablePPO | RecurrentPPO, episodes: int = 2) -> tuple[Recorder, bool]:
    """Train for some rollouts of one episode each; the record, and whether every policy parameter moved."""
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    recorder = Recorder()
    model.learn(episodes * E * STEPS, callback=recorder)
    after = model.policy.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    return recorder, all(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("view", VIEWS)
def test_observations_are_gymnasium_s_flattening(view: type[GrowthVectorEnv]) -> None:
    envs = view(E, **SETTINGS)
    env = GrowthVecEnv(envs)
    env.seed(3)
    seen = env.reset()
    observation, _ = view(E, **SETTINGS).reset(seed=3)
    space = envs.single_observation_space
    for row in range(E):
        one = {name: part[row] for name, part in observation.items()}
        np.testing.assert_array_equal(seen[row], gymnasium.spaces.flatten(space, one))
        assert env.observation_space.contains(seen[row])
    assert (seen.dtype, seen.shape) == (np.float32, (E, *env.observation_space.shape))


@pytest.mark.parametrize("view", VIEWS)
def test_episodes_end_are_told_and_begin_anew(view: type[GrowthVectorEnv]) -> None:
    env, core = GrowthVecEnv(view(E, **SETTINGS)), view(E, **SETTINGS)
    env.seed(0)
    env.action_space.seed(0)
    env.reset()
    core.reset(seed=0)
    everyone = np.ones(E, np.bool_)
    for _ in range(2):
        returns = np.zeros(E)
        for step in range(STEPS):
            actions = np.stack([env.action_space.sample() for _ in range(E)])
            seen, rewards, ended, infos = env.step(actions)
            observation, same, terminated, _, info = core.step(actions)
            np.testing.assert_array_equal(rewards, same.astype(np.float32))
            returns += rewards
            assert ended.tolist() == terminated.tolist() == [step == STEPS - 1] * E
            for row, told in enumerate(infos):
                assert told["action"].tolist() == info["action"][row].tolist()
                assert told["canonicalised"] == info["canonicalised"][row]
                assert told["instance"] == info["instance"][row]
                assert told["TimeLimit.truncated"] is False
                assert ("terminal_observation" in told) == ended[row]
        np.testing.assert_array_equal(
            np.stack([told["terminal_observation"] for told in infos]), flatten_observations(observation)
        )
        worth = core.growth.episodes.potential
        np.testing.assert_allclose(returns, worth, atol=1e-5, err_msg="the return is J of the committed network")
        observation, info = core.reset(options={"reset_mask": everyone})
        np.testing.assert_array_equal(seen, flatten_observations(observation))
        assert [told["instance"] for told in env.reset_infos] == info["instance"].tolist()


def test_an_episode_that_ends_alone_begins_alone() -> None:
    env, core = GrowthVecEnv(joint()), joint()
    env.seed(0)
    env.reset()
    core.reset(seed=0)
    for one in (env.envs, core):  # network 1 is two steps ahead of the others
        waiting = np.zeros(E, np.int64)
        one.step(waiting)
        one.step(waiting)
        one.reset(options={"reset_mask": np.array([True, False, True, True])})
    for _ in range(STEPS - 2):
        seen, _, ended, infos = env.step(np.zeros(E, np.int64))
        observation, *_ = core.step(np.zeros(E, np.int64))
    assert ended.tolist() == [False, True, False, False]
    assert ["terminal_observation" in told for told in infos] == ended.tolist()
    np.testing.assert_array_equal(infos[1]["terminal_observation"], flatten_observations(observation)[1])
    np.testing.assert_array_equal(seen[[0, 2, 3]], flatten_observations(observation)[[0, 2, 3]])
    assert not np.array_equal(seen[1], flatten_observations(observation)[1])


def test_seeds_are_used_once() -> None:
    env, core = GrowthVecEnv(joint()), joint()
    env.seed(7)
    np.testing.assert_array_equal(env.reset(), flatten_observations(core.reset(seed=7)[0]))
    np.testing.assert_array_equal(env.reset(), flatten_observations(core.reset()[0]))


def test_returns_reach_stable_baselines_own_statistics() -> None:
    env = VecMonitor(GrowthVecEnv(joint()))
    env.seed(0)
    env.reset()
    total = np.zeros(E)
    for _ in range(STEPS):
        _, rewards, _, infos = env.step(np.zeros(E, np.int64))
        total += rewards
    np.testing.assert_allclose([told["episode"]["r"] for told in infos], total, atol=1e-5)
    assert [told["episode"]["l"] for told in infos] == [STEPS] * E


def test_maskable_ppo_learns_under_exact_masks() -> None:
    env = GrowthVecEnv(joint())
    model = MaskablePPO("MlpPolicy", env, ent_coef=0.01, seed=0, **ROLLOUT)
    record, moved = learned(model)
    assert moved
    assert len(record.steps) == 2 * STEPS
    choices = len(env.envs.actions)
    for step in record.steps:
        np.testing.assert_array_equal(step["action_masks"], step["obs_tensor"][:, :choices].numpy())
        assert step["action_masks"][np.arange(E), step["actions"]].all()
        assert not any(told["canonicalised"] for told in step["infos"])
    assert len({action for step in record.steps for action in step["actions"].tolist()}) > 5


def test_maskable_ppo_learns_with_eight_heads() -> None:
    env = GrowthVecEnv(GrowthVectorEnv(E, **SETTINGS))
    model = MaskablePPO("MlpPolicy", env, seed=0, **ROLLOUT)
    record, moved = learned(model)
    assert moved
    sizes = env.action_space.nvec
    offsets = np.cumsum([0, *sizes[:-1]])
    overruled = 0
    for step in record.steps:
        np.testing.assert_array_equal(step["action_masks"], step["obs_tensor"][:, : sum(sizes)].numpy())
        for row, chosen in enumerate(step["actions"]):
            assert step["action_masks"][row, offsets + chosen].all()
        effective = np.stack([told["action"] for told in step["infos"]])
        overruled += int((effective[:, 0] != step["actions"][:, 0]).sum())
    assert overruled, "marginal masks let illegal combinations through, which become WAIT"


def test_recurrent_ppo_learns_without_masks() -> None:
    env = GrowthVecEnv(joint())
    model = RecurrentPPO("MlpLstmPolicy", env, seed=0, policy_kwargs={"lstm_hidden_size": 16}, **ROLLOUT)
    record, moved = learned(model)
    assert moved
    told = [info for step in record.steps for info in step["infos"]]
    assert {info["canonicalised"] for info in told} == {True, False}
    assert not any(info["action"].any() for info in told if info["canonicalised"]), "what is illegal becomes WAIT"


def model_of(kind: str, env: GrowthVecEnv) -> MaskablePPO | RecurrentPPO:
    if kind == "maskable":
        return MaskablePPO("MlpPolicy", env, seed=0, **ROLLOUT)
    return RecurrentPPO("MlpLstmPolicy", env, seed=0, policy_kwargs={"lstm_hidden_size": 16}, **ROLLOUT)


@pytest.mark.parametrize("kind", ["maskable", "recurrent"])
def test_a_model_as_controller_does_what_it_does_in_its_environment(kind: str) -> None:
    env = GrowthVecEnv(joint())
    model = model_of(kind, env)
    controller = ModelController(kind, model, env.envs.actions)
    env.seed(1)
    seen, memory, state, begins = env.reset(), None, controller.start(range(E)), np.ones(E, np.bool_)
    for _ in range(STEPS):
        running = env.envs.growth.episodes
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        masks = {"action_masks": np.stack(env.env_method("action_masks"))} if kind == "maskable" else {}
        chosen, memory = model.predict(seen, memory, begins, deterministic=True, **masks)
        seen, _, begins, infos = env.step(chosen)
        assert actions.tolist() == [told["action"].tolist() for told in infos]
        if kind == "recurrent":
            np.testing.assert_array_equal(np.stack(state), np.stack(memory))


@pytest.mark.parametrize("kind", ["maskable", "recurrent"])
def test_a_model_plays_what_esper_s_policies_play(kind: str) -> None:
    env = GrowthVecEnv(joint())
    controller = ModelController(kind, model_of(kind, env), env.envs.actions)
    suite = env.envs.growth.suite
    instances = suite.sample(3, "heldout", np.random.default_rng(0))
    played = evaluate_cohort(CohortTask(EvaluationConfig("short", Rules()), [CohortPart(controller, instances)]))[0]
    assert [record.controller for record in played.records] == [kind] * 3
    assert [record.instance for record in played.records] == [instance.name for instance in instances]


def test_a_model_of_other_actions_is_refused() -> None:
    env = GrowthVecEnv(GrowthVectorEnv(1, **SETTINGS))
    model = MaskablePPO("MlpPolicy", env, n_steps=2, device="cpu", batch_size=2)
    with pytest.raises(ConfigError, match="MultiDiscrete.*not in the 28 joint actions"):
        ModelController("heads", model, joint(1).actions)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="without autoreset_mode"):
        GrowthVecEnv(make_vector(E, autoreset_mode=AutoresetMode.SAME_STEP, **SETTINGS))
    env = GrowthVecEnv(joint())
    with pytest.raises(ConfigError, match="step_async"):
        env.step_wait()
    with pytest.raises(ConfigError, match="no reset options"):
        env.set_options({"reset_mask": None})
    for asked in (env.get_attr, env.env_method):
        with pytest.raises(AttributeError, match="'colour'"):
            asked("colour")
    with pytest.raises(AttributeError, match="'suite'.*cannot be set"):
        env.set_attr("suite", "digits")
    assert env.has_attr("action_masks")
    assert env.env_is_wrapped(gymnasium.Wrapper) == [False] * E
    env.close()
