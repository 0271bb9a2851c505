"""stable_baselines3 and sb3-contrib on growth (extra ``sb3``): a vector environment, and a model as a controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from esper.control.controller import Actions
from esper.engine.observation import Observation
from esper.errors import ConfigError
from esper.extras import describe_missing
from esper.integrations.joint import ACTION_MASK, JointActions
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.numerics.arrays import Bools, Float32s
from esper.rl.gym import (
    RESET_MASK,
    Array,
    Arrays,
    GrowthVectorEnv,
    Info,
    copy_conditional_masks,
    make_observation_arrays,
)

try:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("sb3", "esper.integrations.sb3", error.name)) from error

_MASKS = "action_masks"
"""What sb3-contrib asks for by name."""


class GrowthVecEnv(VecEnv):
    """E networks for the algorithms of stable_baselines3 and sb3-contrib.

    Observations are float32 ``[E, N]``, see `flatten_observations`. An episode that ends begins anew in the same
    step: its last observation is ``infos[i]["terminal_observation"]``. ``infos[i]["action"]`` is the action that took
    effect, int64 ``[8]``, and ``infos[i]["canonicalised"]`` whether it was another than the one asked for.

    Args:
        envs: a `JointVectorEnv`, whose masks are exact, or a `GrowthVectorEnv`, whose masks are marginal.

    Raises:
        ConfigError: ``envs`` resets by itself.
    """

    def __init__(self, envs: GrowthVectorEnv) -> None:
        if envs.autoreset_mode is not AutoresetMode.DISABLED:
            raise ConfigError("stable_baselines3 resets episodes itself: make the environment without autoreset_mode")
        self.envs = envs
        self._actions: Array | None = None
        super().__init__(envs.num_envs, spaces.flatten_space(envs.single_observation_space), envs.single_action_space)

    def reset(self) -> Float32s:
        """Begin new episodes everywhere; seeds given by `seed` are used once."""
        observation, info = self.envs.reset(seed=self._seeds)
        self._reset_seeds()
        self._begun(info, np.ones(self.num_envs, np.bool_))
        return flatten_observations(observation)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Raises ConfigError: there are no options."""
        if options:
            raise ConfigError("episodes of growth have no reset options: leave set_options out")

    def step_async(self, actions: Array) -> None:
        """Take the actions of the next step, ``[E]`` or ``[E, 8]`` as ``envs`` does."""
        self._actions = actions

    def step_wait(self) -> tuple[Float32s, Float32s, Bools, list[Info]]:
        """Observations ``[E, N]``, rewards ``[E]``, ends ``[E]`` and infos.

        Raises:
            ConfigError: no actions were given.
        """
        if self._actions is None:
            raise ConfigError("there are no actions to wait for: call step_async() first")
        actions, self._actions = self._actions, None
        observation, rewards, ended, _, info = self.envs.step(actions)
        seen = flatten_observations(observation)
        infos = [_of_row(info, row) for row in range(self.num_envs)]
        if ended.any():
            for row in np.flatnonzero(ended).tolist():
                infos[row]["terminal_observation"] = seen[row]
            observation, fresh = self.envs.reset(options={RESET_MASK: ended})
            self._begun(fresh, ended)
            seen = flatten_observations(observation)
        return seen, rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        """Nothing is open."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """``render_mode`` and ``action_masks`` per network; raises AttributeError for any other, as others do."""
        attributes = {"render_mode": None, _MASKS: self.envs.action_masks}
        if attr_name not in attributes:
            raise AttributeError(f"growing networks have no attribute '{attr_name}' (known: {', '.join(attributes)})")
        return [attributes[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Raises AttributeError: networks have nothing to set."""
        raise AttributeError(f"'{attr_name}' of growing networks cannot be set: settings are arguments of `envs`")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """``action_masks``: what is legal now, bool ``[n]`` or ``[sum(head sizes)]`` per network.

        Raises AttributeError for any other, as others do.
        """
        if method_name != _MASKS:
            raise AttributeError(f"growing networks have no method '{method_name}' (known: {_MASKS})")
        masks = self.envs.action_masks()
        return [masks[row] for row in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """No network is."""
        return [False for _ in self._get_indices(indices)]

    def _begun(self, info: Info, rows: Bools) -> None:
        for row in np.flatnonzero(rows).tolist():
            self.reset_infos[row] = {"instance": info["instance"][row]}


def _of_row(info: Info, row: int) -> Info:
    return {
        "instance": info["instance"][row],
        "action": info["action"][row],
        "canonicalised": bool(info["canonicalised"][row]),
        "rolled_back": bool(info["rolled_back"][row]),
        "TimeLimit.truncated": False,  # the horizon is observed: nothing to bootstrap from
    }


class ModelController:
    """Acts by a model that was trained on a `JointVectorEnv`, greedily; what is illegal becomes WAIT.

    Args:
        name: what results are recorded under.
        model: the trained model.
        actions: those of the environment that it was trained on.

    Raises:
        ConfigError: the model chooses among another number of actions.
    """

    def __init__(self, name: str, model: MaskablePPO | RecurrentPPO, actions: JointActions) -> None:
        if model.action_space != spaces.Discrete(len(actions)):
            raise ConfigError(f"the model acts in {model.action_space}, not in the {len(actions)} joint actions given")
        self.name = name
        self._model = model
        self._actions = actions

    def start(self, seeds: Sequence[int]) -> Any:
        """No memory yet."""
        return None

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """One decision per network."""
        legal = self._actions.legal(copy_conditional_masks(masks))
        seen = flatten_observations({**make_observation_arrays(observation, masks), ACTION_MASK: legal})
        if isinstance(self._model, MaskablePPO):
            chosen, state = self._model.predict(seen, deterministic=True, action_masks=legal)
        else:
            begins = np.full(len(seen), state is None)
            chosen, state = self._model.predict(seen, state, begins, deterministic=True)
        actions, _ = canonicalise(self._actions.decode(chosen), masks)
        return actions.astype(np.int64), state


def flatten_observations(observation: Arrays) -> Float32s:
    """Observations ``[E, ...]`` as ``[E, N]``, parts in alphabetical order: as `gymnasium.spaces.flatten` of each."""
    parts: list[NDArray[Any]] = [observation[name].reshape(len(observation[name]), -1) for name in sorted(observation)]
    return np.concatenate(parts, axis=1, dtype=np.float32)
