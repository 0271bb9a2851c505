"""Twelve shifts for a language model: other inputs, other kinds of text, other answers. Part of adapt_gap.py.

Windows of `LENGTH` characters; the host has learned Python's documentation, and is to learn from few windows of what
follows. All texts come with Python.
"""

from __future__ import annotations

import json
import string
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper.tasks.texts import read_text

ALPHABET = string.printable
LENGTH = 64
WINDOWS = 4000
"""Of the documentation; half of them are the host's."""
FEWER = 800
"""Of another text."""
NOISE = 0.15
"""Share of the characters that are replaced."""


class Windows(NamedTuple):
    """Characters and what comes next at each, both int64 ``[N, LENGTH]``, as places in `ALPHABET`."""

    inputs: Tensor
    labels: Tensor


class Shifted(NamedTuple):
    """A shift by its name and kind, and the windows after it."""

    name: str
    kind: str
    windows: Windows


def cut(text: str, count: int) -> Windows:
    """That many windows, spread evenly over the text, which may overlap where it is short."""
    codes = torch.tensor([place for one in text if (place := ALPHABET.find(one)) >= 0])
    starts = torch.linspace(0, len(codes) - LENGTH - 2, count).long().unsqueeze(1)
    places = starts + torch.arange(LENGTH)
    return Windows(codes[places], codes[places + 1])


def names() -> str:
    """Of Unicode's characters."""
    found = (unicodedata.name(chr(point), "") for point in range(32, min(sys.maxunicode, 8000)))
    return "\n".join(name for name in found if name)


def arithmetic() -> str:
    pairs = torch.randint(2, 100, (6000, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return "\n".join(f"{a} * {b} = {a * b}, {a} + {b} = {a + b}" for a, b in pairs)


def records() -> str:
    draws = torch.randint(0, 1000, (2000, 3), generator=torch.Generator().manual_seed(1)).tolist()
    return "\n".join(json.dumps({"id": a, "size": [b, c], "open": a > b, "name": f"item-{c:03d}"}) for a, b, c in draws)


TEXTS: dict[str, Callable[[], str]] = {
    "code": partial(read_text, "sources"),
    "names": names,
    "arithmetic": arithmetic,
    "records": records,
}


def permutation(seed: int) -> Tensor:
    """Of the letters; other characters stay."""
    table, letters = torch.arange(len(ALPHABET)), torch.tensor([ALPHABET.index(one) for one in string.ascii_letters])
    table[letters] = letters[torch.randperm(len(letters), generator=torch.Generator().manual_seed(seed))]
    return table


def kinds_of_characters() -> Tensor:
    """Small letter, capital, digit, white space or other, by the place in the alphabet."""
    groups = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.whitespace)
    return torch.tensor([next((n for n, group in enumerate(groups) if one in group), 4) for one in ALPHABET])


def replace_some(inputs: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    hit = torch.rand(inputs.shape, generator=generator) < NOISE
    return torch.where(hit, torch.randint(len(ALPHABET), inputs.shape, generator=generator), inputs)


def list_shifts(rest: Windows) -> Iterator[Shifted]:
    """All twelve; ``rest`` are windows of the documentation that the host has not learned."""
    inputs, labels = rest
    upper = torch.tensor([ALPHABET.index(one.upper()) for one in ALPHABET])
    yield Shifted("noise", "input", Windows(replace_some(inputs), labels))
    yield Shifted("capitals", "input", Windows(upper[inputs], upper[labels]))
    yield Shifted("backwards", "input", Windows(labels.flip(1), inputs.flip(1)))
    yield Shifted("recoded", "input", Windows(permutation(0)[inputs], labels))
    yield Shifted("cycled", "output", Windows(inputs, (labels + 1) % len(ALPHABET)))
    yield Shifted("permuted", "output", Windows(inputs, permutation(1)[labels]))
    yield Shifted("merged", "output", Windows(inputs, kinds_of_characters()[labels]))
    yield Shifted("one later", "output", Windows(inputs[:, :-1], labels[:, 1:]))
    for name, text in TEXTS.items():
        windows = cut(text(), FEWER)
        order = torch.randperm(FEWER, generator=torch.Generator().manual_seed(len(name)))
        yield Shifted(name, "feature", Windows(windows.inputs[order], windows.labels[order]))
