"""Character language modelling: find the next character, everywhere in a text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

from esper.files import write_atomically
from esper.tasks.practice.cache import cache_folder, made
from esper.tasks.practice.examples import Splits, Windows
from esper.tasks.practice.task import Access
from esper.tasks.practice.token_file import tokenised

LENGTH = 64
"""Characters that a host sees."""
VALIDATION, TEST = 0.05, 0.1
"""Shares of the text, from its end."""


class CharLm:
    """Any UTF-8 text; by default that of Python's own help, half a million characters of English and code."""

    name = "charlm"
    hosts = ("gpt",)
    reads_text = True

    def load(self, access: Access) -> Splits:
        """Split by position: training, then validation, then test."""
        folder = cache_folder() / self.name
        text = _help_text(folder) if access.text is None else access.text
        tokens, alphabet = tokenised(text, folder)
        test = round(len(tokens) * (1 - TEST))
        validation = round(len(tokens) * (1 - TEST - VALIDATION))
        parts = (tokens[:validation], tokens[validation:test], tokens[test:])
        return Splits(*(Windows(part, LENGTH) for part in parts), classes=len(alphabet))


def _help_text(folder: Path) -> Path:
    """The topics of `help()`, which differ from one version of Python to the next, in one file."""
    path = made(folder) / "python-help.txt"
    content = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return path
