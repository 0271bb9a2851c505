"""The suite `language`: causal transformers of two to four blocks that predict the next symbol at every position.

In order: the host, the families and their hidden variants, the suite. Growth is scored by the loss, as is usual for
language models: at most positions several symbols may follow, and only the loss measures how well their probabilities
are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.numerics.modules import Stackable
from esper.numerics.random_streams import child_generator
from esper.tasks.instance import PARTS, Data, Instance, Part, Scale, add_label_noise, standardise
from esper.tasks.language_problems import (
    HELP,
    LENGTH,
    SYMBOLS,
    Sampler,
    drop_repeated,
    sample_brackets,
    sample_chain,
    sample_counts,
    sample_keyed_chain,
    sample_repetition,
    sample_sums,
    sample_text,
    sample_topics,
)
from esper.tasks.suite import OptimizerSettings, Source
from esper.tasks.variants import Families, VariantSuite

POSITIONS = LENGTH - 1

# The host


@dataclass(frozen=True)
class Shape:
    """The sizes of a host. A block without heads and hidden units has no parameters and is the identity."""

    width: int
    """Number of channels of the residual stream."""
    heads: tuple[int, ...]
    """Number of attention heads of each block."""
    hidden: tuple[int, ...]
    """Number of hidden units of each block."""


HEAD = 16
"""Number of channels of an attention head."""
EPSILON = 1e-5
"""Added to the mean square of channels, so that zeros stay finite."""
FULL = Shape(32, (2,) * 4, (64,) * 4)


class Projection(Stackable):
    """A linear map without bias: tokens ``[..., B, T, inputs]`` to ``[..., B, T, outputs]``.

    Initial weights are uniform, with variance ``gain / inputs``.
    """

    def __init__(self, inputs: int, outputs: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = (3 * gain / inputs) ** 0.5 if inputs else 0.0
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        products = tokens.flatten(-3, -2) @ self.weight.mT
        return products.view(*tokens.shape[:-1], -1)


class RootMeanSquare(Stackable):
    """Scales tokens ``[..., B, T, C]`` to a root mean square of one over their live channels (arXiv:1910.07467)."""

    channels: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Padded channels are zero, so dividing by the number of live channels gives the mean over these.
        self.register_buffer("channels", torch.tensor(float(channels)))

    def forward(self, tokens: Tensor) -> Tensor:
        mean_square = tokens.square().sum(-1, keepdim=True) / self.channels[..., None, None, None]
        return tokens * (mean_square + EPSILON).rsqrt()


class Block(Stackable):
    """A pre-norm transformer block, causal attention and a perceptron (arXiv:2002.04745), on tokens ``[..., B, T, C]``.

    The projections into the residual stream have no bias. So a block whose parameters are all zero is the identity and
    gets no gradient, and hosts of any depth can share one architecture.
    """

    def __init__(self, shape: Shape, index: int, generator: torch.Generator) -> None:
        super().__init__()
        width, inner, hidden = shape.width, HEAD * shape.heads[index], shape.hidden[index]
        self.norm = RootMeanSquare(width)
        self.query, self.key, self.value = (Projection(width, inner, 1.0, generator) for _ in range(3))
        # Small, so that the residual stream starts close to the embedded symbols alone.
        self.merge = Projection(inner, width, 0.1, generator)
        self.wide = Projection(width, hidden, 2.0, generator)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.narrow = Projection(hidden, width, 0.1, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        # Fused attention needs four axes, [N, H, T, HEAD]: the examples of all networks become one batch.
        query, key, value = (
            project(normed).flatten(0, -3).unflatten(-1, (-1, HEAD)).transpose(-3, -2)
            for project in (self.query, self.key, self.value)
        )
        if query.shape[-3]:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:  # torch 2.9 divides by the number of heads
            attended = query + key + value
        attended = attended.transpose(-3, -2).flatten(-2)
        tokens = tokens + self.merge(attended.reshape(*tokens.shape[:-1], -1))
        hidden = self.wide(self.norm(tokens)) + self.bias[..., None, None, :]
        return tokens + self.narrow(hidden.relu())


class LanguageHost(Stackable):
    """A causal transformer: one-hot symbols ``[..., B, T, SYMBOLS]`` to logits of the next symbols, of the same shape.

    ``block0`` to ``block3`` are the sites.
    """

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = Projection(SYMBOLS, shape.width, 0.5, generator)
        self.position = nn.Parameter(torch.empty(POSITIONS, shape.width).uniform_(-0.5, 0.5, generator=generator))
        self.block0, self.block1, self.block2, self.block3 = (Block(shape, index, generator) for index in range(4))
        self.norm = RootMeanSquare(shape.width)
        self.head = Projection(shape.width, SYMBOLS, 0.1, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs) + self.position[..., None, :, :]
        tokens = self.block3(self.block2(self.block1(self.block0(tokens))))
        return self.head(self.norm(tokens))


# Families and their hidden variants

TWO = Shape(32, (2, 2, 0, 0), (64, 64, 0, 0))
THREE = Shape(16, (1, 1, 1, 0), (32, 32, 32, 0))
BLIND = Shape(32, (0,) * 4, (64, 64, 64, 0))
"""Three blocks without attention, so that predictions depend on the last symbol only."""
LINEAR = Shape(32, (2, 2, 0, 0), (0,) * 4)
"""Two blocks without hidden units."""
TRAIN_SIZES = (512, 1024)
SCARCE = (256,)


@dataclass(frozen=True)
class Variant:
    """A hidden setting of a family."""

    sampler: Sampler
    shape: Shape
    train_sizes: tuple[int, ...] = TRAIN_SIZES
    label_noise: float = 0.0
    after_drift: Sampler | None = None
    """Replaces ``sampler`` at the instance's drift step."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of channels at each site."""
        return (self.shape.width,) * len(self.shape.heads)


Family = Mapping[str, Variant]

_chain = partial(sample_chain, order=1, symbols=32)
_keyed = partial(sample_keyed_chain, keys=4, symbols=16)
_two_apart, _three_apart = partial(sample_repetition, periods=(2,)), partial(sample_repetition, periods=(3,))

TRAINING: Mapping[str, Family] = {
    "chain": {
        "first_blind": Variant(_chain, BLIND, SCARCE, label_noise=0.3),
        "second_full": Variant(partial(sample_chain, order=2, symbols=8), FULL),
    },
    "keyed": {
        "blind": Variant(_keyed, BLIND),
        "linear": Variant(_keyed, LINEAR),
    },
    "repetition": {
        "two_apart_blind": Variant(_two_apart, BLIND),
        "three_apart_linear": Variant(_three_apart, LINEAR),
    },
    "brackets": {
        "shallow_blind": Variant(partial(sample_brackets, kinds=6, deepest=2), BLIND),
        "deep_two": Variant(partial(sample_brackets, kinds=12, deepest=6), TWO),
    },
    "sums": {
        "base_5_linear": Variant(partial(sample_sums, base=5), LINEAR),
        "base_4_blind": Variant(partial(sample_sums, base=4), BLIND),
    },
    "prose": {
        "three": Variant(partial(sample_text, name="help"), THREE),
        "full": Variant(partial(sample_text, name="help"), FULL, SCARCE),
    },
    "drift": {
        "to_keyed_blind": Variant(_chain, BLIND, after_drift=_keyed),
        "to_repetition_two": Variant(_chain, TWO, after_drift=_two_apart),
    },
}

TRANSFER: Mapping[str, Family] = {
    "counts": {
        "two_letters_blind": Variant(partial(sample_counts, letters=2, most=8), BLIND),
        "three_letters_linear": Variant(partial(sample_counts, letters=3, most=5), LINEAR),
    },
    "topics": {
        "blind": Variant(partial(sample_topics, topics=4), BLIND),
        "three": Variant(partial(sample_topics, topics=4), THREE),
    },
    "code": {
        "blind": Variant(partial(sample_text, name="sources"), BLIND),
        "three": Variant(partial(sample_text, name="sources"), THREE),
    },
}


# The suite

RENT = 0.04
LEARNING_RATES = (0.006, 0.015)
DRIFT_STEPS = range(4, 8)

FAMILIES = Families("language family", {**TRAINING, **TRANSFER}, RENT, LEARNING_RATES, DRIFT_STEPS)
_HIDDEN_STREAM, _FRESH_STREAM, _NOISE_STREAM = range(3)
_CACHED_POOLS = 64
_ROUNDS = 100
"""Largest number of attempts to draw enough distinct sequences."""
_ONE_HOT = Scale.of(np.eye(SYMBOLS, dtype=np.float32))
"""The scale of one-hot symbols, which is the same for all sequences."""


class LanguageSuite(VariantSuite):
    """Sequences of 24 positions and 32 symbols; the label at each position is the next symbol."""

    name = "language"
    classes = SYMBOLS
    input_shape = (POSITIONS, SYMBOLS)
    label_shape = (POSITIONS,)
    sites = ("block0", "block1", "block2", "block3")
    blueprints = ("mlp", "attention", "norm", "lowrank_8")
    steps = 18
    batches_per_step = 6
    batch_size = 16
    validation_size = 64
    test_size = 256
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0, clip_norm=1.0)
    table = FAMILIES
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)
    source = Source("shipped with Python, or computed", HELP)
    objective = "loss"

    def template(self) -> LanguageHost:
        return LanguageHost(FULL, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> LanguageHost:
        self.check(instance)
        shape = FAMILIES.find(instance.family, instance.variant).shape
        return LanguageHost(shape, torch.Generator().manual_seed(instance.seed))

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Standardised one-hot inputs ``[N, POSITIONS, SYMBOLS]``, and the next symbols ``[N, POSITIONS]``."""
        self.check(instance)
        # All parts are cut from one pool of distinct sequences, so they share none; training comes first.
        ends = np.cumsum([instance.train_size, self.validation_size, self.test_size])
        pool = _sample_pool(instance, phase, int(ends[-1]))
        sequences = np.split(pool, ends[:-1])[PARTS.index(part)]
        inputs, labels = sequences[:, :-1], sequences[:, 1:]
        if part == "train" and instance.label_noise:
            noise = child_generator(instance.seed, phase, _NOISE_STREAM)
            labels = add_label_noise(labels, instance.label_noise, SYMBOLS, noise)
        return standardise(np.eye(SYMBOLS, dtype=np.float32)[inputs], labels, _ONE_HOT)


@lru_cache(maxsize=_CACHED_POOLS)
def _sample_pool(instance: Instance, phase: int, count: int) -> Ints:
    """Sequences ``[count, LENGTH]`` for all parts of an instance, no two with the same inputs."""
    sampler: Sampler = FAMILIES.find_sampler(instance, phase)
    hidden, fresh = (child_generator(instance.seed, phase, stream) for stream in (_HIDDEN_STREAM, _FRESH_STREAM))
    pool = drop_repeated(sampler(count, hidden, fresh))
    for _ in range(_ROUNDS):
        if len(pool) >= count:
            return pool[:count]
        again = sampler(count, child_generator(instance.seed, phase, _HIDDEN_STREAM), fresh)
        pool = drop_repeated(np.concatenate([pool, again]))
    raise TaskError(f"instance {instance.name} needs {count} distinct sequences, and its language has too few")
