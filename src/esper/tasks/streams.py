"""Independent random streams of one instance."""

from __future__ import annotations

import numpy as np


def stream(seed: int, *key: int) -> np.random.Generator:
    """The generator of the seed's child that ``key`` names; different keys give independent streams."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
