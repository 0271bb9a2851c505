"""Character language modelling: a text as a file of tokens, one per character, built once and mapped into memory."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple, cast

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from esper.errors import TaskError
from esper.files import replace_file, write_atomically
from esper.tasks.practice.download import cache_folder, ensure_folder
from esper.tasks.practice.examples import Splits, Tokens, Windows
from esper.tasks.practice.registry import DataAccess

CHUNK = 1 << 22
"""Bytes of text in memory at a time."""
MOST_CHARACTERS = 1 << 16
"""Different ones, that fit the tokens' type."""


class TokenisedText(NamedTuple):
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


def tokenise(text: Path, folder: Path) -> TokenisedText:
    """The tokens of a UTF-8 text, from ``folder`` or made now.

    The file is named by a hash of the text, so another text never meets it.

    Raises:
        TaskError: the text cannot be read, is not UTF-8, or has too many different characters.
        RunError: the folder cannot be written.
    """
    found = _survey(text)
    path = ensure_folder(folder) / f"{found.sha256}.npy"
    if not path.is_file():
        _write(text, found, path)
    return TokenisedText(_map(path, found), "".join(map(chr, found.alphabet.tolist())))


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
    with replace_file(path) as temporary:
        tokens = open_memmap(temporary, mode="w+", dtype=_token_type(found), shape=(found.length,))
        begin = 0
        for chunk in _chunks(text):
            tokens[begin : begin + len(chunk)] = np.searchsorted(found.alphabet, chunk)
            begin += len(chunk)
        tokens.flush()


def _map(path: Path, found: _Survey) -> Tokens:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TaskError(f"the token file {path} is damaged ({error}): delete it") from error
    if tokens.shape != (found.length,) or tokens.dtype != _token_type(found):
        raise TaskError(f"the token file {path} does not fit its text: delete it")
    return cast("Tokens", tokens)


def _token_type(found: _Survey) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
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


LENGTH = 64
"""Characters that a host sees."""
VALIDATION, TEST = 0.05, 0.1
"""Shares of the text, from its end."""


class CharLm:
    """Any UTF-8 text; by default that of Python's own help, half a million characters of English and code."""

    name = "charlm"
    hosts = ("gpt",)
    reads_text = True

    def load(self, access: DataAccess) -> Splits:
        """Split by position: training, then validation, then test."""
        folder = cache_folder() / self.name
        text = _help_text(folder) if access.text is None else access.text
        tokens, alphabet = tokenise(text, folder)
        test = round(len(tokens) * (1 - TEST))
        validation = round(len(tokens) * (1 - TEST - VALIDATION))
        parts = (tokens[:validation], tokens[validation:test], tokens[test:])
        return Splits(*(Windows(part, LENGTH) for part in parts), classes=len(alphabet))


def _help_text(folder: Path) -> Path:
    """The topics of `help()`, which differ from one version of Python to the next, in one file."""
    path = ensure_folder(folder) / "python-help.txt"
    content = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path
