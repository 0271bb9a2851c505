"""What a request asks for."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from esper.errors import ConfigError

LARGEST = 2**53
"""Numbers above it are not whole in a browser."""


def number(query: QueryParams, name: str) -> int:
    """A whole number that must be given; ConfigError if it is not one."""
    found = optional_number(query, name)
    if found is None:
        raise ConfigError(f"`{name}` is missing: give a whole number from 0")
    return found


def optional_number(query: QueryParams, name: str) -> int | None:
    """A whole number, or None where none is given; ConfigError if it is not one."""
    return whole(query.get(name, ""), name)


def whole(text: str, name: str) -> int | None:
    """What a text that is called ``name`` says, or None if it is empty; ConfigError if that is no whole number."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and int(text) <= LARGEST):
        raise ConfigError(f"`{name}` is {text[:40]!r}: give a whole number from 0")
    return int(text)
