"""Texts that come with Python; they differ between versions of Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data import topics
from typing import Literal

from esper.errors import TaskError

TextName = Literal["help", "sources"]
"""``help``: Python's help on its language; ``sources``: the source code of `asyncio`, of about the same length."""

HELP = Path(str(topics.__file__))
"""The file that the help is read from."""


def read_text(name: TextName) -> str:
    """One of the texts, about 500,000 characters long."""
    return _TEXTS[name]()


def _read_help() -> str:
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def _read_sources() -> str:
    folder = Path(asyncio.__file__).parent
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TaskError(f"there are no sources in {folder}: use a Python that is installed with its library's sources")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


_TEXTS: Mapping[TextName, Callable[[], str]] = {"help": _read_help, "sources": _read_sources}
