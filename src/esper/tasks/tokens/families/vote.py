"""vote: half of the tokens show the label, at very different loudness."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, class_tokens, random_labels
from esper.tasks.tokens.host import CLASSES, TOKENS

HONEST = 0.5
"""Probability that a token shows the label instead of a uniform class."""


def vote(count: int, directions: Floats, rng: np.random.Generator, *, spread: float) -> Examples:
    """Token classes are mostly the label; each token is scaled by ``exp(spread * N(0, 1))``.

    With a large spread the loudest token drowns the others, and normalising each token pays.
    """
    labels = random_labels(count, rng)
    shape = (count, TOKENS)
    honest = rng.random(shape, dtype=np.float32) < HONEST
    classes = np.where(honest, labels[:, None], rng.integers(CLASSES, size=shape))
    loudness = np.exp(spread * rng.standard_normal(shape, dtype=np.float32))
    return Examples(class_tokens(classes, directions, rng) * loudness[:, :, None], labels)
