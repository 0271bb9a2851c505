"""Stored values as JSON that every browser takes."""

from __future__ import annotations

import json
import math
from typing import Any, cast

DAMAGED = "damaged"
"""The only key of a payload that cannot be read."""
DEEPEST = 60
"""Levels of nesting that are kept; no event has more than five."""


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """The same value with None for numbers that JSON has no word for, and for what is nested beyond reason."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: plain(inner, depth - 1) for key, inner in items} if depth else None
    if isinstance(value, list):
        return [plain(inner, depth - 1) for inner in cast("list[Any]", value)] if depth else None
    return value


def payload_of(text: str) -> dict[str, Any]:
    """An event's fields; under `DAMAGED` what is there instead of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return cast("dict[str, Any]", plain(found)) if isinstance(found, dict) else {DAMAGED: str(text)[:200]}
