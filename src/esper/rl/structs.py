"""Structs of arrays: named tuples and dictionaries of tensors or numpy arrays, within one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

Struct = TypeVar("Struct")


def map_arrays(change: Callable[[Any], Any], struct: Struct) -> Struct:
    """A struct of what ``change`` makes of each array."""
    return merge_arrays(lambda parts: change(parts[0]), [struct])


def merge_arrays(merge: Callable[[list[Any]], Any], structs: Sequence[Struct]) -> Struct:
    """A struct of what ``merge`` makes of the arrays that have the same place in equally built structs."""
    return _merge(merge, list(structs))


def _merge(merge: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    kind = cast("Callable[..., Any]", type(parts[0]))
    if isinstance(parts[0], tuple):
        return kind(*(_merge(merge, list(column)) for column in zip(*parts, strict=True)))
    if isinstance(parts[0], dict):
        names = cast("dict[str, Any]", parts[0])
        return {name: _merge(merge, [part[name] for part in parts]) for name in names}
    return merge(parts)


def named_arrays(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every array of named tuples within one another, under a name such as ``masks.slot``."""
    for name, part in struct._asdict().items():
        if isinstance(part, tuple):
            yield from named_arrays(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part
