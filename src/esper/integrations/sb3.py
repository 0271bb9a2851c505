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
"""The name of the method that sb3-contrib calls."""


class GrowthVecEnv(VecEnv):
    """E networks for the algorithms of stable_baselines3 and sb3-contrib.

    Observations are float32 ``[E, N]``, see `flatten_observations`. An episode that ends is reset in the same step:
    its last observation is ``infos[i]["terminal_observation"]``. ``infos[i]["action"]`` is the action that took effect,
    int64 ``[8]``, and ``infos[i]["canonicalised"]`` whether it differs from the requested one.

    Args:
        envs: A `JointVectorEnv`, whose masks are exact, or a `GrowthVectorEnv`, whose masks are marginal.

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
        """Begin new episodes in all networks; random seeds that `seed` set are used once."""
        observation, info = self.envs.reset(seed=self._seeds)
        self._reset_seeds()
        self._record_instances(info, np.ones(self.num_envs, np.bool_))
        return flatten_observations(observation)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Refuse options: episodes of growth have none.

        Raises:
            ConfigError: there are options.
        """
        if options:
            raise ConfigError("episodes of growth have no reset options: remove set_options")

    def step_async(self, actions: Array) -> None:
        """Set the actions of the next step, ``[E]`` or ``[E, 8]`` as ``envs`` takes them."""
        self._actions = actions

    def step_wait(self) -> tuple[Float32s, Float32s, Bools, list[Info]]:
        """Take the step; returns observations ``[E, N]``, rewards ``[E]``, ends ``[E]`` and infos.

        Raises:
            ConfigError: `step_async` was not called.
        """
        if self._actions is None:
            raise ConfigError("there are no actions to wait for: call step_async() first")
        actions, self._actions = self._actions, None
        observation, rewards, ended, _, info = self.envs.step(actions)
        flat = flatten_observations(observation)
        infos: list[Info] = [
            {
                "instance": info["instance"][row],
                "action": info["action"][row],
                "canonicalised": bool(info["canonicalised"][row]),
                "rolled_back": bool(info["rolled_back"][row]),
                "TimeLimit.truncated": False,  # the horizon is observed: nothing to bootstrap from
            }
            for row in range(self.num_envs)
        ]
        # Episodes that ended begin anew in the same step.
        if ended.any():
            for row in np.flatnonzero(ended).tolist():
                infos[row]["terminal_observation"] = flat[row]
            observation, reset_info = self.envs.reset(options={RESET_MASK: ended})
            self._record_instances(reset_info, ended)
            flat = flatten_observations(observation)
        return flat, rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        """Close ``envs``."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute ``render_mode`` or ``action_masks`` per network; AttributeError for any other."""
        attributes = {"render_mode": None, _MASKS: self.envs.action_masks}
        if attr_name not in attributes:
            raise AttributeError(f"growing networks have no attribute '{attr_name}' (known: {', '.join(attributes)})")
        return [attributes[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refuse to set an attribute, with AttributeError: settings are arguments of ``envs``."""
        raise AttributeError(f"'{attr_name}' of growing networks cannot be set: settings are arguments of `envs`")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call ``action_masks``: the mask of legal actions, bool ``[n]`` or ``[sum(head sizes)]``, per network.

        Raises:
            AttributeError: another method is called.
        """
        if method_name != _MASKS:
            raise AttributeError(f"growing networks have no method '{method_name}' (known: {_MASKS})")
        masks = self.envs.action_masks()
        return [masks[row] for row in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Whether each network is wrapped, which is never the case."""
        return [False for _ in self._get_indices(indices)]

    def _record_instances(self, info: Info, rows: Bools) -> None:
        for row in np.flatnonzero(rows).tolist():
            self.reset_infos[row] = {"instance": info["instance"][row]}


class ModelController:
    """A controller that acts greedily by a model trained on a `JointVectorEnv`; illegal actions become WAIT.

    Args:
        name: Name of the controller in results.
        model: The trained model.
        actions: The joint actions of the environment that it was trained on.

    Raises:
        ConfigError: the model has another number of actions.
    """

    def __init__(self, name: str, model: MaskablePPO | RecurrentPPO, actions: JointActions) -> None:
        if model.action_space != spaces.Discrete(len(actions)):
            raise ConfigError(f"the model acts in {model.action_space}, not in the {len(actions)} joint actions given")
        self.name = name
        self._model = model
        self._actions = actions

    def start(self, seeds: Sequence[int]) -> Any:
        """The initial state: none, before the first decision."""
        return None

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """Take one decision per network; returns the actions ``[E, 8]`` and the next state."""
        # Only MaskablePPO takes the mask; what another model chooses against it becomes WAIT.
        legal = self._actions.legal(copy_conditional_masks(masks))
        flat = flatten_observations({**make_observation_arrays(observation, masks), ACTION_MASK: legal})
        if isinstance(self._model, MaskablePPO):
            numbers, state = self._model.predict(flat, deterministic=True, action_masks=legal)
        else:
            is_first = np.full(len(flat), state is None)
            numbers, state = self._model.predict(flat, state, is_first, deterministic=True)
        actions, _ = canonicalise(self._actions.decode(numbers), masks)
        return actions.astype(np.int64), state


def flatten_observations(observation: Arrays) -> Float32s:
    """Flatten observations ``[E, ...]`` to ``[E, N]``, parts in alphabetical order, as `gymnasium.spaces.flatten`."""
    parts: list[NDArray[Any]] = [observation[name].reshape(len(observation[name]), -1) for name in sorted(observation)]
    return np.concatenate(parts, axis=1, dtype=np.float32)
