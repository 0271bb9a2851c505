"""Read an observation by the names of its features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.control.features import BLUEPRINT_FEATURES, GLOBAL_FEATURES, SLOT_FEATURES
from esper.control.spaces import Observation

Floats = NDArray[np.float32]

_GLOBAL = {feature.name: index for index, feature in enumerate(GLOBAL_FEATURES)}
_SLOT = {feature.name: index for index, feature in enumerate(SLOT_FEATURES)}
_BLUEPRINT = {feature.name: index for index, feature in enumerate(BLUEPRINT_FEATURES)}


class Reading:
    """An observation of E networks as named arrays. An unknown name is a KeyError."""

    def __init__(self, observation: Observation) -> None:
        self._globals, self._slots, self._blueprints = (part.cpu().numpy() for part in observation)

    def network(self, name: str) -> Floats:
        """A feature of the whole network, ``[E]``."""
        return self._globals[:, _GLOBAL[name]]

    def slot(self, name: str) -> Floats:
        """A feature of each slot, ``[E, S]``."""
        return self._slots[:, :, _SLOT[name]]

    def blueprint(self, name: str) -> Floats:
        """A feature of each blueprint in each slot, ``[E, S, K]``."""
        return self._blueprints[..., _BLUEPRINT[name]]
