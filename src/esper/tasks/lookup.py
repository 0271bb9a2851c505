"""Find something by name, or say which names come near."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from esper.errors import TaskError

Value = TypeVar("Value")


def lookup(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """``table[name]``; raises TaskError that names near matches, or every choice if nothing is near."""
    if name in table:
        return table[name]
    near = get_close_matches(name, table)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(table)}"
    raise TaskError(f"no {kind} is called '{name}': {hint}")
