"""The interface of everything that decides about growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.control.spaces import Observation
from esper.lifecycle.actions import Head
from esper.lifecycle.masks import ActionMasks

Actions = NDArray[np.int64]


class Controller(Protocol):
    """Decides for E networks at once, from what it observes and what is legal, with a state of its own."""

    name: str

    def start(self, seeds: Sequence[int]) -> Any:
        """The state before the first decision; whatever is random for network i follows from ``seeds[i]``."""
        ...

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        """Legal actions int64 ``[E, 8]`` and the next state."""
        ...


class UniformStreams:
    """One stream of uniform numbers per network, so that no network's draws depend on its neighbours."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def draw(self) -> NDArray[np.float64]:
        """One number in [0, 1) per network and head, ``[E, 8]``."""
        return np.stack([generator.random(len(Head)) for generator in self._generators])
