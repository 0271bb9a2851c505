"""Character language modelling: a UTF-8 text as tokens in memory, one per character."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.tasks.practice.examples import Splits, Tokens, Windows
from esper.tasks.practice.registry import DataAccess

LENGTH = 64
"""Characters that a host sees."""
VALIDATION, TEST = 0.05, 0.1
"""Shares of the text, from its end."""
CHUNK = 1 << 22
"""Characters that are read at a time, of a text that may be much longer."""
MOST_CHARACTERS = 1 << 16
"""Different ones, that fit the tokens' type."""


class CharLm:
    """Any UTF-8 text; by default that of Python's own help, half a million characters of English and code."""

    name = "charlm"
    hosts = ("gpt",)
    reads_text = True

    def load(self, access: DataAccess) -> Splits:
        """Split by position: training, then validation, then test."""
        tokens, alphabet = tokenise(access.text)
        test = round(len(tokens) * (1 - TEST))
        validation = round(len(tokens) * (1 - TEST - VALIDATION))
        parts = (tokens[:validation], tokens[validation:test], tokens[test:])
        return Splits(*(Windows(part, LENGTH) for part in parts), classes=len(alphabet))


class TokenisedText(NamedTuple):
    """A text as indices into its own alphabet."""

    tokens: Tokens
    """``[N]``, of the smallest type that holds an index."""
    alphabet: str
    """The characters that occur, in the order of their code points."""


def tokenise(text: Path | None) -> TokenisedText:
    """The tokens of a UTF-8 text, which is read once; None: of Python's help.

    Raises:
        TaskError: the text cannot be read, is not UTF-8, or has too many different characters, or too few.
    """
    alphabet: NDArray[np.uint32] = np.zeros(0, np.uint32)
    pieces: list[tuple[NDArray[np.uint32], Tokens]] = []
    for points in _read_code_points(text):
        own = np.unique(points)
        alphabet = np.union1d(alphabet, own)
        if len(alphabet) > MOST_CHARACTERS:
            raise TaskError(f"{text} has more than {MOST_CHARACTERS} different characters: give another text")
        pieces.append((own, np.searchsorted(own, points).astype(_index_type(own))))
    if len(alphabet) < 2:
        raise TaskError(f"{text} has {len(alphabet)} different characters, which leaves nothing to learn")
    tokens: Tokens = np.empty(sum(len(piece) for _, piece in pieces), _index_type(alphabet))
    begin = 0
    for own, piece in pieces:
        tokens[begin : begin + len(piece)] = np.searchsorted(alphabet, own)[piece]
        begin += len(piece)
    return TokenisedText(tokens, "".join(map(chr, alphabet.tolist())))


def _index_type(alphabet: NDArray[np.uint32]) -> type[np.uint8 | np.uint16]:
    return np.uint8 if len(alphabet) <= 1 << 8 else np.uint16


def _read_code_points(text: Path | None) -> Iterator[NDArray[np.uint32]]:
    for characters in _read_python_help() if text is None else _read_characters(text):
        yield np.frombuffer(characters.encode("utf-32-le"), "<u4")


def _read_characters(text: Path) -> Iterator[str]:
    try:
        with text.open(encoding="utf-8", newline="") as file:
            while characters := file.read(CHUNK):
                yield characters
    except OSError as error:
        raise TaskError(f"cannot read the text {text} ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"the text {text} is not UTF-8: convert it first") from error


def _read_python_help() -> Iterator[str]:
    """The topics of `help()`, which differ from one version of Python to the next."""
    yield "\n".join(topics.topics[name] for name in sorted(topics.topics))
