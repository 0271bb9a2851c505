"""The suite `language`: causal transformers of two to four blocks that predict the next symbol at every position.

In order: the samplers, the host, the families and their hidden variants, the suite. Growth is scored by the loss, since
at most positions several symbols may follow, and only the loss measures how well their probabilities are predicted.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from pydoc_data import topics
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.errors import TaskError
from esper.numerics.arrays import Ints
from esper.numerics.modules import Stackable
from esper.numerics.random_streams import child_generator
from esper.tasks.instance import PARTS, Data, Instance, Part, Scale, add_label_noise, standardise
from esper.tasks.suite import Families, OptimizerSettings, Source, Variant, VariantSuite

# Samplers: sequences of symbols, from procedural grammars and from texts

SYMBOLS = 32
"""Number of symbols of every language; grammars may use fewer."""
LENGTH = 25
"""Number of symbols in a sequence: 24 inputs, each with the next symbol as its label."""


Sampler = Callable[[int, np.random.Generator, np.random.Generator], Ints]
"""Maps ``(N, hidden, fresh)`` to N sequences ``[N, LENGTH]``; what an instance fixes is drawn from ``hidden``."""


# Grammars. Where several symbols may follow, their probabilities are unequal, so that there is much to learn.

SUCCESSORS = (0.6, 0.25, 0.15)
"""Probabilities of the three symbols that may follow a context."""


def sample_chain(
    count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, order: int, symbols: int
) -> Ints:
    """A Markov chain of this order, in which three symbols may follow each context."""
    table = hidden.integers(symbols, size=(*[symbols] * order, len(SUCCESSORS)))
    sequences = fresh.integers(symbols, size=(count, LENGTH))
    choices = fresh.choice(len(SUCCESSORS), p=SUCCESSORS, size=sequences.shape)
    for place in range(order, LENGTH):
        context = sequences[:, place - order : place].T
        sequences[:, place] = table[(*context, choices[:, place])]
    return sequences


def sample_keyed_chain(
    count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, keys: int, symbols: int
) -> Ints:
    """A Markov chain whose transition table is chosen by the first symbol, which does not occur again."""
    names = hidden.permutation(SYMBOLS)
    table = hidden.integers(symbols, size=(keys, symbols, len(SUCCESSORS)))
    key = fresh.integers(keys, size=count)
    sequences = fresh.integers(symbols, size=(count, LENGTH))
    choices = fresh.choice(len(SUCCESSORS), p=SUCCESSORS, size=sequences.shape)
    for place in range(2, LENGTH):
        sequences[:, place] = table[key, sequences[:, place - 1], choices[:, place]]
    sequences[:, 0] = symbols + key
    return names[sequences]


FAVOURED, SHARE = 8, 0.6
"""Number of symbols that a topic favours, and the fraction of a sequence's symbols drawn from them."""


def sample_topics(count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, topics: int) -> Ints:
    """Independent symbols, some favoured by the sequence's topic, which must be inferred from earlier symbols."""
    favourites = np.stack([hidden.permutation(SYMBOLS)[:FAVOURED] for _ in range(topics)])
    topic = fresh.integers(topics, size=(count, 1))
    favoured = favourites[topic, fresh.integers(FAVOURED, size=(count, LENGTH))]
    return np.where(fresh.random((count, LENGTH)) < SHARE, favoured, fresh.integers(SYMBOLS, size=(count, LENGTH)))


FAITHFUL = 0.95
"""Probability that a symbol follows its rule instead of being uniform."""


def sample_repetition(
    count: int, _hidden: np.random.Generator, fresh: np.random.Generator, *, periods: Sequence[int]
) -> Ints:
    """Random symbols, repeated with a period that is drawn from ``periods`` for each sequence.

    With several periods, the symbol to copy must be found by matching the context, as an induction head does (Olsson et
    al., 2022, arXiv:2209.11895).
    """
    period = fresh.choice(np.asarray(periods), size=count)
    sequences = fresh.integers(SYMBOLS, size=(count, LENGTH))
    follows = fresh.random(sequences.shape) < FAITHFUL
    rows = np.arange(count)
    for place in range(LENGTH):
        source = place - period
        repeated = sequences[rows, np.maximum(source, 0)]
        sequences[:, place] = np.where(follows[:, place] & (source >= 0), repeated, sequences[:, place])
    return sequences


def sample_brackets(
    count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, kinds: int, deepest: int
) -> Ints:
    """Nested brackets of several ``kinds``, at most ``deepest`` levels deep (a Dyck language)."""
    names = hidden.permutation(SYMBOLS)[: 2 * kinds].reshape(2, kinds)
    opens = fresh.random((count, LENGTH)) < 0.5
    new = fresh.integers(kinds, size=(count, LENGTH))
    stacks, depth = np.zeros((count, deepest), np.int64), np.zeros(count, np.int64)
    sequences, rows = np.empty((count, LENGTH), np.int64), np.arange(count)
    for place in range(LENGTH):
        opening = (opens[:, place] & (depth < deepest)) | (depth == 0)
        last = stacks[rows, np.maximum(depth - 1, 0)]
        stacks[rows[opening], depth[opening]] = new[opening, place]
        sequences[:, place] = np.where(opening, names[0, new[:, place]], names[1, last])
        depth += np.where(opening, 1, -1)
    return sequences


def sample_sums(count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, base: int) -> Ints:
    """Each digit is the sum of the two before it, modulo ``base``."""
    digits = fresh.integers(base, size=(count, LENGTH))
    follows = fresh.random(digits.shape) < FAITHFUL
    for place in range(2, LENGTH):
        total = (digits[:, place - 2] + digits[:, place - 1]) % base
        digits[:, place] = np.where(follows[:, place], total, digits[:, place])
    return hidden.permutation(SYMBOLS)[digits]


def sample_counts(
    count: int, hidden: np.random.Generator, fresh: np.random.Generator, *, letters: int, most: int
) -> Ints:
    """Words such as aaabbbccc, of a few kinds with different letters; all letters are repeated equally often."""
    kinds = (SYMBOLS - 1) // letters
    names = hidden.permutation(SYMBOLS)
    repeats = fresh.integers(1, most + 1, size=(count, LENGTH))
    kind = fresh.integers(kinds, size=repeats.shape)
    sequences = np.empty((count, LENGTH), np.int64)
    for sequence, own_kinds, own_repeats in zip(sequences, kind, repeats, strict=True):
        words = [
            np.repeat([*range(one * letters, (one + 1) * letters), SYMBOLS - 1], [*[times] * letters, 1])
            for one, times in zip(own_kinds.tolist(), own_repeats.tolist(), strict=True)
        ]
        sequence[:] = np.concatenate(words)[:LENGTH]
    return names[sequences]


# Texts that come with Python, and differ between its versions

TextName = Literal["help", "sources"]
"""``help``: Python's help on its language; ``sources``: the source code of `asyncio`, of about the same length."""
HELP = Path(str(topics.__file__))
"""The file that the help is read from."""


def read_text(name: TextName) -> str:
    """One of the texts, about 500,000 characters long."""
    if name == "help":
        return "\n".join(topics.topics[topic] for topic in sorted(topics.topics))
    folder = Path(asyncio.__file__).parent
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TaskError(f"there are no sources in {folder}: use a Python that is installed with its library's sources")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


ALPHABET = "\n abcdefghijklmnopqrstuvwxyz_.,"
"""Characters of texts, in lower case; one more symbol stands for all other characters."""


def sample_text(count: int, _hidden: np.random.Generator, fresh: np.random.Generator, *, name: TextName) -> Ints:
    """Windows of a text, in order, so that each part of the data has its own stretch of the text."""
    windows = list_windows(name)
    return windows[np.sort(fresh.choice(len(windows), count, replace=False))]


@cache
def list_windows(name: TextName) -> Ints:
    """Consecutive windows ``[N, LENGTH]`` of a text, without duplicates."""
    codes = np.frombuffer(read_text(name).lower().encode("utf-32-le"), "<u4")
    known = np.frombuffer(ALPHABET.encode("utf-32-le"), "<u4")
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], codes), len(known) - 1)
    indices = np.where(known[order][place] == codes, order[place], len(known))
    windows = indices[: len(indices) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64)
    distinct = drop_repeated(windows)
    distinct.flags.writeable = False  # all instances of the process share it
    return distinct


def drop_repeated(sequences: Ints) -> Ints:
    """Drop all but the first of the sequences ``[N, LENGTH]`` with equal inputs; the order is kept."""
    _, first = np.unique(sequences[:, :-1], axis=0, return_index=True)
    return sequences[np.sort(first)]


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
    """A linear map of tokens ``[..., B, T, inputs]``; initial weights are uniform with variance ``gain / inputs``."""

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

    The projections into the residual stream have no bias, so a block whose parameters are all zero is the identity and
    gets no gradient.
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
SCARCE = (256,)


def _vary(sampler: Sampler, shape: Shape, **settings: Any) -> Variant:
    return Variant(sampler, (shape.width,) * len(shape.heads), shape, **settings)


_chain = partial(sample_chain, order=1, symbols=32)
_keyed = partial(sample_keyed_chain, keys=4, symbols=16)
_two_apart, _three_apart = partial(sample_repetition, periods=(2,)), partial(sample_repetition, periods=(3,))

TRAINING: Families = {
    "chain": {
        "first_blind": _vary(_chain, BLIND, train_sizes=SCARCE, label_noise=0.3),
        "second_full": _vary(partial(sample_chain, order=2, symbols=8), FULL),
    },
    "keyed": {"blind": _vary(_keyed, BLIND), "linear": _vary(_keyed, LINEAR)},
    "repetition": {"two_apart_blind": _vary(_two_apart, BLIND), "three_apart_linear": _vary(_three_apart, LINEAR)},
    "brackets": {
        "shallow_blind": _vary(partial(sample_brackets, kinds=6, deepest=2), BLIND),
        "deep_two": _vary(partial(sample_brackets, kinds=12, deepest=6), TWO),
    },
    "sums": {
        "base_5_linear": _vary(partial(sample_sums, base=5), LINEAR),
        "base_4_blind": _vary(partial(sample_sums, base=4), BLIND),
    },
    "prose": {
        "three": _vary(partial(sample_text, name="help"), THREE),
        "full": _vary(partial(sample_text, name="help"), FULL, train_sizes=SCARCE),
    },
    "drift": {
        "to_keyed_blind": _vary(_chain, BLIND, after_drift=_keyed),
        "to_repetition_two": _vary(_chain, TWO, after_drift=_two_apart),
    },
}

TRANSFER: Families = {
    "counts": {
        "two_letters_blind": _vary(partial(sample_counts, letters=2, most=8), BLIND),
        "three_letters_linear": _vary(partial(sample_counts, letters=3, most=5), LINEAR),
    },
    "topics": {
        "blind": _vary(partial(sample_topics, topics=4), BLIND),
        "three": _vary(partial(sample_topics, topics=4), THREE),
    },
    "code": {
        "blind": _vary(partial(sample_text, name="sources"), BLIND),
        "three": _vary(partial(sample_text, name="sources"), THREE),
    },
}


# The suite

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
    optimizer = OptimizerSettings(clip_norm=1.0)
    kind = "language family"
    table = {**TRAINING, **TRANSFER}
    train_sizes = (512, 1024)
    rent = 0.04
    learning_rates = (0.006, 0.015)
    drift_steps = range(4, 8)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)
    source = Source("shipped with Python, or computed", HELP)
    objective = "loss"

    def template(self) -> LanguageHost:
        return LanguageHost(FULL, torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> LanguageHost:
        self.check(instance)
        shape: Shape = self.find_variant(instance.family, instance.variant).host
        return LanguageHost(shape, torch.Generator().manual_seed(instance.seed))

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Standardised one-hot inputs ``[N, POSITIONS, SYMBOLS]``, and the next symbols ``[N, POSITIONS]``."""
        self.check(instance, phase)
        # All parts are cut from one pool of distinct sequences, so they share none; training comes first.
        ends = np.cumsum([instance.train_size, self.validation_size, self.test_size])
        pool = _sample_pool(self, instance, phase, int(ends[-1]))
        sequences = np.split(pool, ends[:-1])[PARTS.index(part)]
        inputs, labels = sequences[:, :-1], sequences[:, 1:]
        if part == "train" and instance.label_noise:
            noise = child_generator(instance.seed, phase, _NOISE_STREAM)
            labels = add_label_noise(labels, instance.label_noise, SYMBOLS, noise)
        return standardise(np.eye(SYMBOLS, dtype=np.float32)[inputs], labels, _ONE_HOT)


@lru_cache(maxsize=_CACHED_POOLS)
def _sample_pool(suite: LanguageSuite, instance: Instance, phase: int, count: int) -> Ints:
    """Sequences ``[count, LENGTH]`` for all parts of an instance, no two with the same inputs."""
    sampler: Sampler = suite.find_sampler(instance, phase)
    hidden, fresh = (child_generator(instance.seed, phase, stream) for stream in (_HIDDEN_STREAM, _FRESH_STREAM))
    pool = drop_repeated(sampler(count, hidden, fresh))
    for _ in range(_ROUNDS):
        if len(pool) >= count:
            return pool[:count]
        again = sampler(count, child_generator(instance.seed, phase, _HIDDEN_STREAM), fresh)
        pool = drop_repeated(np.concatenate([pool, again]))
    raise TaskError(f"instance {instance.name} needs {count} distinct sequences, and its language has too few")
