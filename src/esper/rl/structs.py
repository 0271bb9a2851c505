"""Structs of arrays: named tuples and dictionaries of tensors or numpy arrays, within one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

Struct = TypeVar("Struct")


def map_arrays(change: Callable[..., Any], first: Struct, *others: Struct) -> Struct:
    """A struct of what ``change`` makes of each array of equally built structs."""
    structs = cast("tuple[Any, ...]", (first, *others))
    if isinstance(first, tuple):
        kind = cast("type[Any]", type(first))
        return kind(*(map_arrays(change, *column) for column in zip(*structs, strict=True)))
    if isinstance(first, dict):
        return cast(Struct, {name: map_arrays(change, *(one[name] for one in structs)) for name in structs[0]})
    return change(*structs)


def named_arrays(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every array of nested named tuples, under a name such as ``masks.slot``."""
    for name, part in struct._asdict().items():
        if isinstance(part, tuple):
            yield from named_arrays(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part
