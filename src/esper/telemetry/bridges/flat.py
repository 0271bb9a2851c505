"""Nested settings under flat names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from esper.telemetry.bridges.sink import Value


def flat(nested: Any) -> dict[str, Value]:
    """Numbers, truth values and texts by their path, as in ``ppo.gamma`` or ``reward.0.mode``; nothing for None.

    A list of such values becomes one text.
    """
    return dict(_leaves(nested, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Value):
        yield path, value
    elif isinstance(value, dict):
        for key, part in cast("dict[str, Any]", value).items():
            yield from _leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
        if all(isinstance(part, Value) for part in parts):
            yield path, ", ".join(map(str, parts))
        else:
            for index, part in enumerate(parts):
                yield from _leaves(part, f"{path}.{index}")
