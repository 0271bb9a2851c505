"""Arguments and results of a network, compared to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


class IncomparableError(Exception):
    """A value of which nobody knows what it is made of."""


def flattened(value: Any) -> list[Any]:
    """The tensors in ``value``, and what tells how they are arranged there.

    Raises:
        IncomparableError: there is something else in it.
    """
    if value is None or isinstance(value, _PLAIN):
        return [value]
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise IncomparableError("a tensor that is nested or sparse")
        return [value]
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return [type(parts), *parts, *(leaf for part in parts.values() for leaf in flattened(part))]
    if isinstance(value, tuple | list):
        items = cast("Sequence[Any]", value)
        return [type(items), len(items), *(leaf for item in items for leaf in flattened(item))]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(leaf for field in fields(value) for leaf in flattened(getattr(value, field.name)))]
    raise IncomparableError(f"a {type(value).__name__}")


def copied(leaves: list[Any]) -> list[Any]:
    """With tensors of their own."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def size(leaves: list[Any]) -> int:
    """Bytes."""
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether two values were equal, not-a-numbers included."""
    return len(some) == len(others) and all(_same(one, other) for one, other in zip(some, others, strict=True))


def apart(some: list[Any], others: list[Any]) -> bool:
    """Whether no tensor of the one shares memory with a tensor of the other."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in some if isinstance(leaf, Tensor) and leaf.numel()}
    return not any(leaf.untyped_storage().data_ptr() in storages for leaf in others if isinstance(leaf, Tensor))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
