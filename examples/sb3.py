"""Control growth by MaskablePPO of sb3-contrib: `pip install sb3-contrib`.

    python examples/sb3.py --steps 1920       # about a minute

The environment is wrapped as stable_baselines3 expects it: flat observations, and episodes that begin by themselves.
"""

import argparse
from typing import Any

import numpy as np
from gymnasium import spaces
from numbered_actions import NumberedActions
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecEnv


class GrowthVecEnv(VecEnv):
    """`NumberedActions` for stable_baselines3. The rewards of an episode add up to J of the network that is kept."""

    def __init__(self, envs: NumberedActions) -> None:
        self.envs = envs
        super().__init__(envs.num_envs, spaces.flatten_space(envs.single_observation_space), envs.single_action_space)

    def reset(self) -> np.ndarray:
        observation, _ = self.envs.reset(seed=self._seeds)
        self._reset_seeds()
        return flatten(observation)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, rewards, ended, _, _ = self.envs.step(self.actions)
        flat = flatten(observation)
        infos = [{"terminal_observation": last} if end else {} for last, end in zip(flat, ended, strict=True)]
        if ended.any():
            flat = flatten(self.envs.reset(options={"reset_mask": ended})[0])
        return flat, rewards.astype(np.float32), ended, infos

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return list(getattr(self.envs, method_name)()[list(self._get_indices(indices))])  # action_masks

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        value = None if attr_name == "render_mode" else getattr(self.envs, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def close(self) -> None:
        self.envs.close()


def flatten(observation: dict[str, np.ndarray]) -> np.ndarray:
    """Observations ``[E, N]``, parts in alphabetical order, as `gymnasium.spaces.flatten` of each."""
    parts = [observation[name].reshape(len(observation[name]), -1) for name in sorted(observation)]
    return np.concatenate(parts, axis=1, dtype=np.float32)


def play(model: MaskablePPO, suite: str) -> float:
    """Mean J of networks that the model grows on 16 held-out instances, without exploring."""
    env = GrowthVecEnv(NumberedActions(16, suite=suite, split="heldout"))
    env.seed(0)
    observation, returns = env.reset(), np.zeros(16)
    for _ in range(env.envs.suite.steps):
        actions, _ = model.predict(observation, deterministic=True, action_masks=env.envs.action_masks())
        observation, rewards, _, _ = env.step(actions)
        returns += rewards
    return float(returns.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1920, help="environment steps of training")
    parser.add_argument("--suite", default="tokens")
    given = parser.parse_args()
    env = GrowthVecEnv(NumberedActions(16, suite=given.suite))
    horizon = env.envs.suite.steps
    model = MaskablePPO("MlpPolicy", env, n_steps=horizon, batch_size=4 * horizon, gamma=1.0, gae_lambda=0.98, seed=0)
    model.learn(given.steps)
    print(f"J on held-out instances {play(model, given.suite):.3f}")
