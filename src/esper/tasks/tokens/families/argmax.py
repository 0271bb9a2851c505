"""bott and quad: the label is the largest of four statistics of Gaussian tokens."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, gaussian_tokens
from esper.tasks.tokens.host import CLASSES


def largest_mean(count: int, directions: Floats, rng: np.random.Generator) -> Examples:
    """``y = argmax_k v_k . mean_t x_t``.

    Easy at full width; behind a bottleneck of two channels (family bott) only a skip from the input brings back what
    was lost.
    """
    inputs = gaussian_tokens(count, rng)
    scores = inputs.mean(axis=1) @ directions[:CLASSES].T
    return Examples(inputs, scores.argmax(axis=1))


def largest_power(count: int, directions: Floats, rng: np.random.Generator) -> Examples:
    """``y = argmax_k mean_t (v_k . x_t)^2``: needs a curved function of each token, which a linear host lacks."""
    inputs = gaussian_tokens(count, rng)
    scores = np.square(inputs @ directions[:CLASSES].T).mean(axis=1)
    return Examples(inputs, scores.argmax(axis=1))
