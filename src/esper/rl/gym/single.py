"""One growing network as a `gymnasium.Env`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from esper.errors import ConfigError
from esper.rl.gym.growth import Growth, GrowthSettings
from esper.rl.gym.spaces import Array, Arrays, action_space, observation_space


class GrowthEnv(gymnasium.Env[dict[str, Any], Array]):
    """A view of one network: what `esper.rl.gym.vector.GrowthVectorEnv` is to E of them.

    Arguments, actions, observations and ``info`` are the same, without the axis over networks.

    Args:
        settings: as `GrowthSettings`.

    Raises:
        TaskError: an unknown suite.
        ConfigError: another setting is not usable.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, **settings: Any) -> None:
        self.growth = Growth(1, GrowthSettings.of(settings))
        self.observation_space = observation_space(self.growth.suite)
        self.action_space = action_space(self.growth.suite)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Arrays, dict[str, Any]]:
        """Begin a new episode on an instance drawn from ``np_random``.

        Raises:
            ConfigError: there are no options.
        """
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"unknown reset option '{next(iter(options))}' (known: none)")
        self.growth.begin(np.ones(1, np.bool_), [self.np_random])
        return _alone(self.growth.observation()), self._info()

    def step(self, action: Array) -> tuple[Arrays, float, bool, bool, dict[str, Any]]:
        """One decision, integers ``[8]``.

        Raises:
            IllegalActionError: ``action`` is no integer array of that shape.
            ResetNeeded: the episode has ended, or none was begun.
        """
        if not self.growth.begun or self.growth.ended[0]:
            raise ResetNeeded("call reset() to begin an episode")
        stepped = self.growth.step(np.asarray(action)[None])
        info = {**self._info(), "action": stepped.action[0], "canonicalised": bool(stepped.canonicalised[0])}
        reward, finished = float(stepped.reward[0]), bool(stepped.finished[0])
        return _alone(self.growth.observation()), reward, finished, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """The flat mask ``[sum(head sizes)]``: choices that are legal under some legal earlier choice."""
        return self.growth.action_masks()[0]

    def final_score(self) -> float:
        """J of the committed network on test data, which nothing else reads."""
        return float(self.growth.final_score().score[0])

    def _info(self) -> dict[str, Any]:
        return {"masks": _alone(self.growth.conditional_masks()), "instance": self.growth.instances[0]}


def _alone(arrays: Arrays) -> Arrays:
    return {name: array[0] for name, array in arrays.items()}
