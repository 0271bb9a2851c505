"""product: how pairs of features vary together inside tokens. For evaluation only."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, gaussian_tokens
from esper.tasks.tokens.host import FEATURES

CORRELATION = 0.8
"""Correlation, of either sign, inside each pair of features."""


def product(count: int, directions: Floats, rng: np.random.Generator) -> Examples:
    """Each of the label's two bits is the sign of the correlation between two of the five hidden features.

    Every feature alone is standard normal whatever the label, so a linear host is at chance and a host with a
    bottleneck loses one factor: a curved function of single tokens (mlp) or a skip from the input is wanted.
    """
    bits = rng.integers(2, size=(2, count))
    signs = (2 * bits - 1).astype(np.float32).T[:, None, :]
    features = gaussian_tokens(count, rng)
    factors, fresh = features[..., 0:2], features[..., 2:4]
    features[..., 2:4] = CORRELATION * signs * factors + np.sqrt(1 - CORRELATION**2, dtype=np.float32) * fresh
    return Examples((features.reshape(-1, FEATURES) @ directions).reshape(features.shape), bits[0] + 2 * bits[1])
