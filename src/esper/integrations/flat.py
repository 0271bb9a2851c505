"""Observations as one vector, for libraries that want no dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.rl.gym.growth import Arrays


def flat(observation: Arrays) -> NDArray[np.float32]:
    """Observations ``[E, ...]`` as ``[E, N]``, parts in alphabetical order: as `gymnasium.spaces.flatten` of each."""
    parts: list[NDArray[Any]] = [observation[name].reshape(len(observation[name]), -1) for name in sorted(observation)]
    return np.concatenate(parts, axis=1, dtype=np.float32)
