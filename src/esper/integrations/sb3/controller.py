"""A model of sb3-contrib as a controller, so that it can be compared with Esper's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO

from esper.control.controller import Actions
from esper.control.observation import Observation
from esper.errors import ConfigError
from esper.integrations.flat import flat
from esper.integrations.joint import ACTION_MASK, JointActions
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.rl.gym.growth import conditional_masks, observation_arrays


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
        legal = self._actions.legal(conditional_masks(masks))
        seen = flat({**observation_arrays(observation, masks), ACTION_MASK: legal})
        if isinstance(self._model, MaskablePPO):
            chosen, state = self._model.predict(seen, deterministic=True, action_masks=legal)
        else:
            begins = np.full(len(seen), state is None)
            chosen, state = self._model.predict(seen, state, begins, deterministic=True)
        actions, _ = canonicalise(self._actions.decoded(chosen), masks)
        return actions.astype(np.int64), state
