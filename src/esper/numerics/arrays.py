"""Arrays: names for their types, and structs of arrays: named tuples, dataclasses and dictionaries of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Bools: TypeAlias = NDArray[np.bool_]
Int8s: TypeAlias = NDArray[np.int8]
Int16s: TypeAlias = NDArray[np.int16]
Ints: TypeAlias = NDArray[np.int64]
Float32s: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]

Struct = TypeVar("Struct")


def map_arrays(change: Callable[[Any], Any], struct: Struct) -> Struct:
    """A struct of what ``change`` makes of each array."""
    return merge_arrays(lambda parts: change(parts[0]), [struct])


def merge_arrays(merge: Callable[[list[Any]], Any], structs: Sequence[Struct]) -> Struct:
    """A struct of what ``merge`` makes of the arrays that have the same place in equally built structs."""
    return _merge(merge, list(structs))


def replace_where(places: Bools, older: Struct, newer: Struct) -> Struct:
    """A struct with the ``newer`` one's entries in ``places``, and the older one's elsewhere.

    ``places``, such as bool ``[E]``, are along the first axes of the arrays, such as ``[E, ...]``.
    """

    def choose(parts: list[NDArray[Any]]) -> NDArray[Any]:
        old, new = parts
        return np.where(places.reshape(*places.shape, *[1] * (old.ndim - places.ndim)), new, old)

    return merge_arrays(choose, [older, newer])


def _merge(merge: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    first = parts[0]
    kind = cast("Callable[..., Any]", type(first))
    if isinstance(first, tuple):
        return kind(*(_merge(merge, list(column)) for column in zip(*parts, strict=True)))
    if isinstance(first, dict):
        names = cast("dict[str, Any]", first)
        return {name: _merge(merge, [part[name] for part in parts]) for name in names}
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return kind(**{name: _merge(merge, [getattr(part, name) for part in parts]) for name in names})
    return None if parts[0] is None else merge(parts)


def iterate_arrays(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every array of named tuples within one another, under a name such as ``masks.slot``."""
    for name, part in struct._asdict().items():
        if isinstance(part, tuple):
            yield from iterate_arrays(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part
