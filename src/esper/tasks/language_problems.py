"""Problems for language models: sequences of symbols, from procedural grammars and from texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Literal

import numpy as np

from esper.errors import TaskError
from esper.numerics.arrays import Ints

SYMBOLS = 32
"""Number of symbols of every language; grammars may use fewer."""
LENGTH = 25
"""Number of symbols in a sequence: 24 inputs, each with the next symbol as its label."""


Sampler = Callable[[int, np.random.Generator, np.random.Generator], Ints]
"""Maps ``(N, hidden, fresh)`` to N sequences ``[N, LENGTH]``. What is fixed for an instance, such as tables and the
symbols in use, is drawn from the generator ``hidden``, the sequences from ``fresh``."""


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

    With one period, the symbol to copy is at a fixed distance. With several, it must be found by matching the context,
    as an induction head does (Olsson et al., 2022, arXiv:2209.11895).
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
    """Windows of a text, in order, so that splitting them into parts gives each part its own stretch of the text."""
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
