"""Check whether a user's function of a batch returns a mean over examples, as it should, or a sum.

Means over several batches weight each batch by its number of examples. With a sum, this number would count twice, and
the results would not show it. So the function is also called with repeated examples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

COPIES = (2, 4)
"""How often each example is repeated. A loss that compares examples may double once, but not twice."""
NOISE = 0.1
"""Largest relative difference from a multiple, for losses that draw random numbers."""


class Reduction(Enum):
    """How a function reduces the examples of a batch to one number."""

    MEAN = "mean"
    """Not a sum."""
    SUM = "sum"
    UNKNOWN = "unknown"
    """The examples of the batch cannot be repeated, or the number is zero."""


def find_reduction(compute: Callable[[Any], float], batch: Any, examples: int) -> Reduction:
    """Find out how ``compute`` reduces a batch, by repeating each example twice and four times.

    Args:
        compute: Returns a number for a batch. It must draw the same random numbers in every call; its errors are
            ignored.
        batch: Any batch. Tensors and arrays are repeated if the length of their first axis is the number of examples,
            and lists if that is their length, also inside lists, tuples, mappings and dataclasses.
        examples: Number of examples in the batch.
    """
    try:
        single = compute(batch)
        if not single:
            return Reduction.UNKNOWN
        for count in COPIES:
            repeated = repeat_examples(batch, examples, count)
            if repeated is batch:
                return Reduction.UNKNOWN
            if not abs(compute(repeated) / single / count - 1) <= NOISE:  # nor if it is not a number
                return Reduction.MEAN
    except Exception:  # noqa: BLE001 - a repeated batch need not fit what the user wrote
        return Reduction.UNKNOWN
    return Reduction.SUM


def repeat_examples(value: Any, examples: int, count: int) -> Any:
    """``value`` with each of its ``examples`` repeated ``count`` times; the same object if it has no examples."""
    if isinstance(value, Tensor):
        fits = not value.is_nested and value.layout is torch.strided and value.dim() and len(value) == examples
        return torch.cat([value] * count) if fits else value
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return np.concatenate([array] * count) if array.ndim and len(array) == examples else array
    # Containers: repeat their contents, or else their entries, if there is one for each example.
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        parts = {key: repeat_examples(part, examples, count) for key, part in mapping.items()}
        if all(parts[key] is part for key, part in mapping.items()):
            return mapping
        if not isinstance(mapping, MutableMapping):
            return parts
        repeated = copy.copy(mapping)  # of the same class, as a tokenizer's
        repeated.update(parts)
        return repeated
    if isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
        items = cast("list[Any] | tuple[Any, ...]", value)
        changed = [repeat_examples(item, examples, count) for item in items]
        if all(map(lambda one, other: one is other, changed, items)):
            return items * count if type(items) in (list, tuple) and len(items) == examples else items
        if isinstance(items, list):
            return changed
        return tuple(changed) if type(items) is tuple else type(items)(*changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changes = {name: repeat_examples(part, examples, count) for name, part in fields.items()}
        return value if all(changes[name] is fields[name] for name in fields) else dataclasses.replace(value, **changes)
    return value
