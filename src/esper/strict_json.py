"""JSON from files that anyone may have written."""

from __future__ import annotations

import json
from typing import Any


def parse(text: bytes) -> Any:
    """The value that ``text`` stands for.

    Raises:
        ValueError: it is no JSON, nested too deeply, or gives a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values
