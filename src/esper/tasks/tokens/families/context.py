"""ctx: what one half of the tokens means may depend on the other half."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, gaussian_tokens
from esper.tasks.tokens.host import TOKENS

EVERYWHERE = 0.8
"""Strength of the bit that all tokens carry."""
HALF = 1.12
"""Strength of a bit that half of the tokens carry."""


def context(count: int, directions: Floats, rng: np.random.Generator, *, flipped: bool) -> Examples:
    """Three bits as signs of three directions: b0 in all tokens, f in the first half, b1 in the last.

    ``y = b0 + 2 (b1 xor f)`` if ``flipped``, which no sum over tokens can tell, so that a gate pays; else
    ``y = b0 + 2 b1``, which the host can learn alone.
    """
    bits = rng.integers(2, size=(3, count))
    b0, b1, f = bits
    everywhere, late, early = (2 * bits - 1).astype(np.float32)[:, :, None, None]
    inputs = gaussian_tokens(count, rng)
    inputs += EVERYWHERE * everywhere * directions[0]
    inputs[:, TOKENS // 2 :] += HALF * late * directions[1]
    inputs[:, : TOKENS // 2] += HALF * early * directions[2]
    return Examples(inputs, b0 + 2 * (b1 ^ f if flipped else b1))
