"""halves: does the last half of the tokens agree with the first? For evaluation only."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, gaussian_tokens
from esper.tasks.tokens.host import TOKENS

STRENGTH = 1.12
"""Length of a sign's direction in the tokens that carry it."""


def halves(count: int, directions: Floats, rng: np.random.Generator) -> Examples:
    """Each half carries a sign along each of two directions; the label's two bits say which signs agree.

    Both bits are an exclusive or across the halves, so a host that cannot mix tokens is at chance; a gate or a
    token-mixing seed is wanted. Unlike in ctx nothing can be learned without one.
    """
    first, last = rng.integers(2, size=(2, 2, count))
    inputs = gaussian_tokens(count, rng)
    early, late = inputs[:, : TOKENS // 2], inputs[:, TOKENS // 2 :]
    for half, bits in ((early, first), (late, last)):
        signs = (2 * bits - 1).astype(np.float32)
        half += STRENGTH * (signs.T @ directions[:2])[:, None]
    agreement = first == last
    return Examples(inputs, agreement[0] + 2 * agreement[1].astype(np.int64))
