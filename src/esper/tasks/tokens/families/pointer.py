"""pointer: a marked token says which other token to read. For evaluation only."""

from __future__ import annotations

import numpy as np

from esper.tasks.data import Floats
from esper.tasks.tokens.examples import Examples, class_tokens
from esper.tasks.tokens.host import CLASSES, TOKENS

MARK = 3.0
"""Length of the mark, along a direction that no token class uses."""


def pointer(count: int, directions: Floats, rng: np.random.Generator, *, distance: int) -> Examples:
    """The label is the class of the token ``distance`` behind the marked one; all token classes are uniform.

    Without mixing tokens a host can only count classes, among which the label is one vote in eight. A seed must bring
    mark and class together: a convolution if they are neighbours, token mixing if they are far apart.
    """
    classes = rng.integers(CLASSES, size=(count, TOKENS))
    marked = rng.integers(TOKENS - distance, size=count)
    rows = np.arange(count)
    inputs = class_tokens(classes, directions, rng)
    inputs[rows, marked] += MARK * directions[CLASSES]
    return Examples(inputs, classes[rows, marked + distance])
