"""Names for types of arrays, and functions on structs of arrays: nested named tuples, dataclasses and dictionaries."""

from collections.abc import Callable, Sequence
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
    """Apply ``change`` to each array of a struct."""
    return merge_arrays(lambda parts: change(parts[0]), [struct])


def merge_arrays(merge: Callable[[list[Any]], Any], structs: Sequence[Struct]) -> Struct:
    """Apply ``merge`` to each list of arrays that have the same place in equally built structs; None stays None."""
    first: Any = structs[0]
    parts: list[Any] = list(structs)
    kind = cast("Callable[..., Any]", type(first))
    if isinstance(first, tuple):
        return kind(*(merge_arrays(merge, column) for column in zip(*parts, strict=True)))
    if isinstance(first, dict):
        names = cast("dict[str, Any]", first)
        return cast("Any", {name: merge_arrays(merge, [part[name] for part in parts]) for name in names})
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return kind(**{name: merge_arrays(merge, [getattr(part, name) for part in parts]) for name in names})
    return cast("Any", None) if first is None else merge(parts)


def replace_where(places: Bools, older: Struct, newer: Struct) -> Struct:
    """A struct with the entries of ``newer`` where ``places`` is true, and those of ``older`` elsewhere.

    The axes of ``places``, such as bool ``[E]``, are the first axes of the arrays, such as ``[E, ...]``.
    """

    def choose(parts: list[NDArray[Any]]) -> NDArray[Any]:
        old, new = parts
        return np.where(places.reshape(*places.shape, *[1] * (old.ndim - places.ndim)), new, old)

    return merge_arrays(choose, [older, newer])
