"""The token suite's families: pure samplers of labelled sequences of tokens.

What distinguishes a family is which kind of seed pays on it, and where. pointer, halves and product are for evaluation
only: no controller trains on them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.numerics.arrays import Float32s, Ints
from esper.tasks.data import LabelledArrays

TOKENS, FEATURES, CLASSES = 8, 5, 4


Sampler = Callable[[int, Float32s, np.random.Generator], LabelledArrays]
"""``(N, directions, rng)`` to N examples ``[N, TOKENS, FEATURES]``. The rows of ``directions`` ``[FEATURES, FEATURES]``
are orthonormal and fixed for the instance: they are what its host has to find."""

CLASS_NORM = 1.5
"""Length of the vectors that stand for token classes."""
CLASS_NOISE = 0.4
"""Deviation of the noise on token classes."""


def random_directions(rng: np.random.Generator) -> Float32s:
    """A random orthonormal basis, one direction per row ``[FEATURES, FEATURES]``."""
    basis, _ = np.linalg.qr(rng.standard_normal((FEATURES, FEATURES)))
    return basis.astype(np.float32)


def gaussian_tokens(count: int, rng: np.random.Generator) -> Float32s:
    """Standard normal tokens ``[N, TOKENS, FEATURES]``."""
    return rng.standard_normal((count, TOKENS, FEATURES), dtype=np.float32)


def class_tokens(classes: Ints, directions: Float32s, rng: np.random.Generator) -> Float32s:
    """Noisy vectors ``[N, TOKENS, FEATURES]`` for token classes ``[N, TOKENS]``, one direction each."""
    vectors = CLASS_NORM * directions[:CLASSES]
    tokens = gaussian_tokens(len(classes), rng)
    tokens *= CLASS_NOISE
    tokens += vectors[classes]
    return tokens


def random_labels(count: int, rng: np.random.Generator) -> Ints:
    """Uniform labels ``[N]``."""
    return rng.integers(CLASSES, size=count)


FAITHFUL = 0.85
"""Probability that a token follows the rule instead of being uniform."""


def order(count: int, directions: Float32s, rng: np.random.Generator, *, distance: int) -> LabelledArrays:
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
    return LabelledArrays(class_tokens(classes.T, directions, rng), labels)


EVERYWHERE = 0.8
"""Strength of the bit that all tokens carry."""
HALF = 1.12
"""Strength of a bit that half of the tokens carry."""


def context(count: int, directions: Float32s, rng: np.random.Generator, *, flipped: bool) -> LabelledArrays:
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
    return LabelledArrays(inputs, b0 + 2 * (b1 ^ f if flipped else b1))


def largest_mean(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """``y = argmax_k v_k . mean_t x_t``.

    Easy at full width; behind a bottleneck of two channels (family bott) only a skip from the input brings back what
    was lost.
    """
    inputs = gaussian_tokens(count, rng)
    scores = inputs.mean(axis=1) @ directions[:CLASSES].T
    return LabelledArrays(inputs, scores.argmax(axis=1))


def largest_power(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """``y = argmax_k mean_t (v_k . x_t)^2``: needs a curved function of each token, which a linear host lacks."""
    inputs = gaussian_tokens(count, rng)
    scores = np.square(inputs @ directions[:CLASSES].T).mean(axis=1)
    return LabelledArrays(inputs, scores.argmax(axis=1))


HONEST = 0.5
"""Probability that a token shows the label instead of a uniform class."""


def vote(count: int, directions: Float32s, rng: np.random.Generator, *, spread: float) -> LabelledArrays:
    """Token classes are mostly the label; each token is scaled by ``exp(spread * N(0, 1))``.

    With a large spread the loudest token drowns the others, and normalising each token pays.
    """
    labels = random_labels(count, rng)
    shape = (count, TOKENS)
    honest = rng.random(shape, dtype=np.float32) < HONEST
    classes = np.where(honest, labels[:, None], rng.integers(CLASSES, size=shape))
    loudness = np.exp(spread * rng.standard_normal(shape, dtype=np.float32))
    return LabelledArrays(class_tokens(classes, directions, rng) * loudness[:, :, None], labels)


MARK = 3.0
"""Length of the mark, along a direction that no token class uses."""


def pointer(count: int, directions: Float32s, rng: np.random.Generator, *, distance: int) -> LabelledArrays:
    """The label is the class of the token ``distance`` behind the marked one; all token classes are uniform.

    Without mixing tokens a host can only count classes, among which the label is one vote in eight. A seed must bring
    mark and class together: a convolution if they are neighbours, token mixing if they are far apart.
    """
    classes = rng.integers(CLASSES, size=(count, TOKENS))
    marked = rng.integers(TOKENS - distance, size=count)
    rows = np.arange(count)
    inputs = class_tokens(classes, directions, rng)
    inputs[rows, marked] += MARK * directions[CLASSES]
    return LabelledArrays(inputs, classes[rows, marked + distance])


STRENGTH = 1.12
"""Length of a sign's direction in the tokens that carry it."""


def halves(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
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
    return LabelledArrays(inputs, agreement[0] + 2 * agreement[1].astype(np.int64))


CORRELATION = 0.8
"""Correlation, of either sign, inside each pair of features."""


def product(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """Each of the label's two bits is the sign of the correlation between two of the five hidden features.

    Every feature alone is standard normal whatever the label, so a linear host is at chance and a host with a
    bottleneck loses one factor: a curved function of single tokens (mlp) or a skip from the input is wanted.
    """
    bits = rng.integers(2, size=(2, count))
    signs = (2 * bits - 1).astype(np.float32).T[:, None, :]
    features = gaussian_tokens(count, rng)
    factors, fresh = features[..., 0:2], features[..., 2:4]
    features[..., 2:4] = CORRELATION * signs * factors + np.sqrt(1 - CORRELATION**2, dtype=np.float32) * fresh
    return LabelledArrays((features.reshape(-1, FEATURES) @ directions).reshape(features.shape), bits[0] + 2 * bits[1])
