"""order: the label is the step between a token and the one ``distance`` before it."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, class_tokens, random_labels
from esper.tasks.tokens.host import CLASSES, TOKENS

FAITHFUL = 0.85
"""Probability that a token follows the rule instead of being uniform."""


def order(count: int, directions: Floats, rng: np.random.Generator, *, distance: int) -> Examples:
    """``z_t = z_{t-distance} + y (mod 4)`` for most tokens.

    Every single token is uniform whatever the label, so a host that cannot mix tokens is at chance: it needs a seed
    that mixes near (distance 1) or far ones (distance 4), at a site wide enough to hold the result.
    """
    labels = random_labels(count, rng)
    classes = rng.integers(CLASSES, size=(TOKENS, count))
    follows = rng.random((TOKENS, count), dtype=np.float32) < FAITHFUL
    for token in range(distance, TOKENS):
        successor = (classes[token - distance] + labels) % CLASSES
        classes[token] = np.where(follows[token], successor, classes[token])
    return Examples(class_tokens(classes.T, directions, rng), labels)
