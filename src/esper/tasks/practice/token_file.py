"""A text as a file of tokens, one per character, built once and then mapped into memory."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.files import replacing
from esper.tasks.practice.cache import made
from esper.tasks.practice.examples import Tokens

CHUNK = 1 << 22
"""Bytes of text in memory at a time."""
MOST_CHARACTERS = 1 << 16
"""Different ones, that fit the tokens' type."""


class Tokenised(NamedTuple):
    """A text as indices into its own alphabet."""

    tokens: Tokens
    """``[N]``, mapped from a file."""
    alphabet: str
    """The characters that occur, in the order of their code points."""


class _Survey(NamedTuple):
    """What a first reading finds."""

    alphabet: NDArray[np.uint32]
    length: int
    sha256: str


def tokenised(text: Path, folder: Path) -> Tokenised:
    """The tokens of a UTF-8 text, from ``folder`` or made now.

    The file is named by a hash of the text, so another text never meets it.

    Raises:
        TaskError: the text cannot be read, is not UTF-8, or has too many different characters.
        RunError: the folder cannot be written.
    """
    found = _survey(text)
    path = made(folder) / f"{found.sha256}.npy"
    if not path.is_file():
        _write(text, found, path)
    return Tokenised(_mapped(path, found), "".join(map(chr, found.alphabet.tolist())))


def _survey(text: Path) -> _Survey:
    digest, length = hashlib.sha256(), 0
    alphabet: NDArray[np.uint32] = np.zeros(0, np.uint32)
    for chunk in _chunks(text):
        digest.update(chunk.tobytes())
        length += len(chunk)
        alphabet = np.union1d(alphabet, chunk)
        if len(alphabet) > MOST_CHARACTERS:
            raise TaskError(f"{text} has more than {MOST_CHARACTERS} different characters: give another text")
    if len(alphabet) < 2:
        raise TaskError(f"{text} has {len(alphabet)} different characters, which leaves nothing to learn")
    return _Survey(alphabet, length, digest.hexdigest())


def _write(text: Path, found: _Survey, path: Path) -> None:
    with replacing(path) as temporary:
        tokens = open_memmap(temporary, mode="w+", dtype=_type(found), shape=(found.length,))
        begin = 0
        for chunk in _chunks(text):
            tokens[begin : begin + len(chunk)] = np.searchsorted(found.alphabet, chunk)
            begin += len(chunk)
        tokens.flush()


def _mapped(path: Path, found: _Survey) -> Tokens:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TaskError(f"the token file {path} is damaged ({error}): delete it") from error
    if tokens.shape != (found.length,) or tokens.dtype != _type(found):
        raise TaskError(f"the token file {path} does not fit its text: delete it")
    return cast("Tokens", tokens)


def _type(found: _Survey) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """The smallest that holds an index into the alphabet."""
    return np.dtype(np.uint8) if len(found.alphabet) <= 1 << 8 else np.dtype(np.uint16)


def _chunks(text: Path) -> Iterator[NDArray[np.uint32]]:
    """The code points of the text, piece by piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with text.open("rb") as file:
            while piece := file.read(CHUNK):
                yield _code_points(decoder.decode(piece))
            decoder.decode(b"", final=True)
    except OSError as error:
        raise TaskError(f"cannot read the text {text} ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"the text {text} is not UTF-8: convert it first") from error


def _code_points(characters: str) -> NDArray[np.uint32]:
    return np.frombuffer(characters.encode("utf-32-le"), "<u4")
