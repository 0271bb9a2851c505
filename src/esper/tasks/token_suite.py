"""The default suite: small token problems on which different blueprints pay, in different slots.

In order: the samplers, the host, which cannot mix tokens, the families and their hidden variants, the suite.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from esper.numerics.arrays import Float32s, Ints
from esper.numerics.modules import Linear, Stackable, TokenLinear
from esper.numerics.random_streams import child_generator
from esper.tasks.instance import PARTS, Instance, LabelledArrays, Part, add_label_noise
from esper.tasks.suite import Families, OptimizerSettings, SampledSuite, Variant, VariantSuite

TOKENS, FEATURES, CLASSES = 8, 5, 4


# Samplers: the examples of each family, and which modules help to solve it

Sampler = Callable[[int, Float32s, np.random.Generator], LabelledArrays]
"""Maps ``(N, directions, rng)`` to N examples ``[N, TOKENS, FEATURES]``. The rows of ``directions``
``[FEATURES, FEATURES]`` are orthonormal and fixed for the instance; its host has to learn them."""

CLASS_NORM = 1.5
"""Norm of the vectors that embed token classes."""
CLASS_NOISE = 0.4
"""Standard deviation of the noise on token classes."""


def draw_directions(rng: np.random.Generator) -> Float32s:
    """A random orthonormal basis, one direction per row ``[FEATURES, FEATURES]``."""
    basis, _ = np.linalg.qr(rng.standard_normal((FEATURES, FEATURES)))
    return basis.astype(np.float32)


def draw_tokens(count: int, rng: np.random.Generator) -> Float32s:
    """Standard normal tokens ``[N, TOKENS, FEATURES]``."""
    return rng.standard_normal((count, TOKENS, FEATURES), dtype=np.float32)


def draw_class_tokens(classes: Ints, directions: Float32s, rng: np.random.Generator) -> Float32s:
    """Noisy vectors ``[N, TOKENS, FEATURES]`` for token classes ``[N, TOKENS]``, one direction each."""
    vectors = CLASS_NORM * directions[:CLASSES]
    tokens = draw_tokens(len(classes), rng)
    tokens *= CLASS_NOISE
    tokens += vectors[classes]
    return tokens


def draw_labels(count: int, rng: np.random.Generator) -> Ints:
    """Uniform labels ``[N]``."""
    return rng.integers(CLASSES, size=count)


FAITHFUL = 0.85
"""Probability that a token follows the rule instead of being uniform."""


def sample_order(count: int, directions: Float32s, rng: np.random.Generator, *, distance: int) -> LabelledArrays:
    """``z_t = z_{t-distance} + y (mod 4)`` for most tokens.

    Each token alone is uniform for every label. The host needs a module that mixes near tokens (distance 1) or far ones
    (distance 4), at a site wide enough to represent the result.
    """
    labels = draw_labels(count, rng)
    classes = rng.integers(CLASSES, size=(TOKENS, count))
    follows = rng.random((TOKENS, count), dtype=np.float32) < FAITHFUL
    for token in range(distance, TOKENS):
        successor = (classes[token - distance] + labels) % CLASSES
        classes[token] = np.where(follows[token], successor, classes[token])
    return LabelledArrays(draw_class_tokens(classes.T, directions, rng), labels)


EVERYWHERE = 0.8
"""Strength of the bit that all tokens encode."""
HALF = 1.12
"""Strength of a bit that half of the tokens encode."""


def sample_context(count: int, directions: Float32s, rng: np.random.Generator, *, flipped: bool) -> LabelledArrays:
    """Three bits as signs along three directions: b0 in all tokens, f in the first half, b1 in the second.

    If ``flipped``, ``y = b0 + 2 (b1 xor f)``, which is not a function of sums over tokens, so that a gate pays.
    Otherwise ``y = b0 + 2 b1``, which the bare host can learn.
    """
    # Signs along three directions, added to Gaussian tokens.
    bits = rng.integers(2, size=(3, count))
    b0, b1, f = bits
    everywhere, late, early = (2 * bits - 1).astype(np.float32)[:, :, None, None]
    inputs = draw_tokens(count, rng)
    inputs += EVERYWHERE * everywhere * directions[0]
    inputs[:, TOKENS // 2 :] += HALF * late * directions[1]
    inputs[:, : TOKENS // 2] += HALF * early * directions[2]
    return LabelledArrays(inputs, b0 + 2 * (b1 ^ f if flipped else b1))


def sample_largest_mean(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """``y = argmax_k v_k . mean_t x_t``, easy at full width; after a bottleneck, a skip from the input is needed."""
    inputs = draw_tokens(count, rng)
    scores = inputs.mean(axis=1) @ directions[:CLASSES].T
    return LabelledArrays(inputs, scores.argmax(axis=1))


def sample_largest_power(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """``y = argmax_k mean_t (v_k . x_t)^2``: a linear host needs a module that is nonlinear in each token."""
    inputs = draw_tokens(count, rng)
    scores = np.square(inputs @ directions[:CLASSES].T).mean(axis=1)
    return LabelledArrays(inputs, scores.argmax(axis=1))


HONEST = 0.5
"""Probability that a token shows the label instead of a uniform class."""


def sample_vote(count: int, directions: Float32s, rng: np.random.Generator, *, spread: float) -> LabelledArrays:
    """The label is the most frequent token class; each token is scaled by ``exp(spread * N(0, 1))``."""
    labels = draw_labels(count, rng)
    shape = (count, TOKENS)
    honest = rng.random(shape, dtype=np.float32) < HONEST
    classes = np.where(honest, labels[:, None], rng.integers(CLASSES, size=shape))
    scales = np.exp(spread * rng.standard_normal(shape, dtype=np.float32))
    return LabelledArrays(draw_class_tokens(classes, directions, rng) * scales[:, :, None], labels)


MARK = 3.0
"""Norm of the mark, along a direction that no token class uses."""


def sample_pointer(count: int, directions: Float32s, rng: np.random.Generator, *, distance: int) -> LabelledArrays:
    """The label is the class of the token ``distance`` after the marked one; all token classes are uniform.

    A module must bring mark and class together: a convolution if they are neighbours, token mixing if far apart.
    """
    classes = rng.integers(CLASSES, size=(count, TOKENS))
    marked = rng.integers(TOKENS - distance, size=count)
    rows = np.arange(count)
    inputs = draw_class_tokens(classes, directions, rng)
    inputs[rows, marked] += MARK * directions[CLASSES]
    return LabelledArrays(inputs, classes[rows, marked + distance])


STRENGTH = 1.12
"""Norm of the vector that encodes a sign in a token."""


def sample_halves(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """Each half of the tokens has a sign along each of two directions; the label's bits are whether these agree.

    A host that cannot mix tokens is at chance: it needs a gate or token mixing.
    """
    first, last = rng.integers(2, size=(2, 2, count))
    inputs = draw_tokens(count, rng)
    early, late = inputs[:, : TOKENS // 2], inputs[:, TOKENS // 2 :]
    for half, bits in ((early, first), (late, last)):
        signs = (2 * bits - 1).astype(np.float32)
        half += STRENGTH * (signs.T @ directions[:2])[:, None]
    agreement = first == last
    return LabelledArrays(inputs, agreement[0] + 2 * agreement[1].astype(np.int64))


CORRELATION = 0.8
"""Absolute correlation within each pair of features."""


def sample_product(count: int, directions: Float32s, rng: np.random.Generator) -> LabelledArrays:
    """Each of the label's two bits is the sign of the correlation between two of the five hidden features.

    A linear host is at chance and needs a nonlinear function of single tokens (``mlp``); a host with a bottleneck loses
    a factor and needs a skip from the input.
    """
    bits = rng.integers(2, size=(2, count))
    signs = (2 * bits - 1).astype(np.float32).T[:, None, :]
    features = draw_tokens(count, rng)
    factors, fresh = features[..., 0:2], features[..., 2:4]
    # Each feature alone stays standard normal.
    features[..., 2:4] = CORRELATION * signs * factors + np.sqrt(1 - CORRELATION**2, dtype=np.float32) * fresh
    return LabelledArrays((features.reshape(-1, FEATURES) @ directions).reshape(features.shape), bits[0] + 2 * bits[1])


# The host


class TokenLayer(nn.Module):
    """``act(W h + b)`` on every token ``[..., B, T, C]``.

    ``act`` multiplies negative values by a slope, 0 for ReLU and 1 for the identity: a buffer, so that both kinds of
    hosts can be stacked.
    """

    slope: torch.Tensor

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = TokenLinear(inputs, outputs, generator)
        self.register_buffer("slope", torch.tensor(slope))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.activate(self.linear(features))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of features ``[..., B, T, outputs]``."""
        if not x.requires_grad:
            # The channels of prelu are the networks here.
            return torch.prelu(x.unsqueeze(0), self.slope.reshape(-1)).squeeze(0)
        # Backward through prelu would take ten times as long.
        return x * x.detach().sign().clamp_min_(self.slope[..., None, None, None])


class PositionedTokenLayer(TokenLayer):
    """A token layer with an additional learned bias for every position."""

    def __init__(self, inputs: int, outputs: int, slope: float, generator: torch.Generator) -> None:
        super().__init__(inputs, outputs, slope, generator)
        self.position = nn.Parameter(torch.zeros(TOKENS, outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.activate(self.linear(features) + self.position.unsqueeze(-3))


def average_tokens(features: torch.Tensor) -> torch.Tensor:
    """The mean over an even number T of tokens: features ``[..., B, T, C]`` to contiguous ``[..., B, C]``."""
    # Adds in the same order as `mean`, but along the axis that is innermost in memory, ten times faster.
    first, second = features.transpose(-3, -1).chunk(2, dim=-2)
    return ((first + second).sum(dim=-2) / features.shape[-2]).mT.contiguous()


class TokenHost(Stackable):
    """Three token layers, the sites, and a linear head: ``[..., B, TOKENS, FEATURES]`` to ``[..., B, CLASSES]``."""

    def __init__(self, widths: Sequence[int], *, linear_host: bool, generator: torch.Generator) -> None:
        super().__init__()
        slope = 1.0 if linear_host else 0.0
        first, second, third = widths
        self.layer0 = PositionedTokenLayer(FEATURES, first, slope, generator)
        self.layer1 = TokenLayer(first, second, slope, generator)
        self.layer2 = TokenLayer(second, third, slope, generator)
        self.head = Linear(third, CLASSES, generator)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.layer2(self.layer1(self.layer0(inputs)))
        return self.head(average_tokens(features))


# Families and their hidden variants

FULL = (10, 10, 10)
LINEAR = "linear"
"""Hosts whose activation is the identity."""

_near_order, _far_order = partial(sample_order, distance=1), partial(sample_order, distance=4)
_near_pointer, _far_pointer = partial(sample_pointer, distance=1), partial(sample_pointer, distance=4)

TRAINING: Families = {
    "order": {
        "near_10_10_10": Variant(_near_order),
        "near_10_3_3": Variant(_near_order, widths=(10, 3, 3)),
        "near_3_3_10": Variant(_near_order, widths=(3, 3, 10)),
        "far_10_10_10": Variant(_far_order),
        "far_10_3_3": Variant(_far_order, widths=(10, 3, 3)),
    },
    "ctx": {
        "flipped": Variant(partial(sample_context, flipped=True)),
        "direct": Variant(partial(sample_context, flipped=False)),
    },
    "bott": {
        "2_10_10": Variant(sample_largest_mean, widths=(2, 10, 10)),
        "10_2_10": Variant(sample_largest_mean, widths=(10, 2, 10)),
        "10_10_2": Variant(sample_largest_mean, widths=(10, 10, 2)),
    },
    "quad": {"linear": Variant(sample_largest_power, host=LINEAR), "relu": Variant(sample_largest_power)},
    "vote": {"loud": Variant(partial(sample_vote, spread=1.8)), "even": Variant(partial(sample_vote, spread=0.2))},
    "plain": {
        "mean": Variant(sample_largest_mean),
        "noisy": Variant(partial(sample_vote, spread=0.2), train_sizes=(96,), label_noise=0.4),
    },
    "drift": {
        "near": Variant(sample_largest_mean, after_drift=_near_order),
        "far": Variant(sample_largest_mean, after_drift=_far_order),
    },
}

TRANSFER: Families = {
    "pointer": {"near": Variant(_near_pointer), "far": Variant(_far_pointer)},
    "halves": {"10_10_10": Variant(sample_halves), "10_3_10": Variant(sample_halves, widths=(10, 3, 10))},
    "product": {"linear": Variant(sample_product, host=LINEAR), "2_10_10": Variant(sample_product, widths=(2, 10, 10))},
}


# The suite

_DIRECTIONS_STREAM = len(PARTS)


class TokenSuite(SampledSuite, VariantSuite):
    """Problems with eight tokens of five features and four classes, and one host architecture for every family."""

    name = "tokens"
    classes = CLASSES
    input_shape = (TOKENS, FEATURES)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("mlp", "token_conv", "attention", "token_mix", "gate", "norm", "input_skip")
    steps = 30
    batches_per_step = 8
    batch_size = 32
    validation_size = 128
    test_size = 512
    optimizer = OptimizerSettings()
    kind = "token family"
    table = {**TRAINING, **TRANSFER}
    widths = FULL
    train_sizes = (384, 512, 768)
    rent = 0.08
    learning_rates = (0.007, 0.015)
    drift_steps = range(9, 15)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        linear = self.find_variant(family, variant).host == LINEAR
        return replace(super().draw(family, variant, seed, rng), linear=linear)

    def template(self) -> TokenHost:
        return TokenHost(FULL, linear_host=False, generator=torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> TokenHost:
        self.check(instance)
        generator = torch.Generator().manual_seed(instance.seed)
        return TokenHost(instance.widths, linear_host=instance.linear, generator=generator)

    def sample_part(self, instance: Instance, part: Part, phase: int) -> LabelledArrays:
        sampler: Sampler = self.find_sampler(instance, phase)
        rng = child_generator(instance.seed, phase, PARTS.index(part))
        # Directions are the same for every part of a phase; examples have a random stream per part.
        directions = draw_directions(child_generator(instance.seed, phase, _DIRECTIONS_STREAM))
        inputs, labels = sampler(self.count_examples(instance, part), directions, rng)
        if part == "train" and instance.label_noise:
            labels = add_label_noise(labels, instance.label_noise, CLASSES, rng)
        return LabelledArrays(inputs, labels)
