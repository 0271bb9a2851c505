"""Settings of a host that affect its outputs but are not in its state: numbers of modules and configuration, buffers.

Two hosts with equal tensors may compute different outputs, because of another base of rotary embeddings, number of
heads, epsilon or activation. Flags and texts are not recorded, because many of them affect only speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.growth.depth import CONFIGURATION
from esper.growth.taps import list_named_modules

HostRecord = Mapping[str, tuple[float, ...] | str]
"""Numbers, or the class of a module without tensors, by their place in the host."""

BUFFER_VALUES = 8
"""Number of first values of a buffer to compare, because a longer input extends some buffers."""
ROUNDING = 1e-2
"""Relative difference of numbers that another device or dtype can cause."""
_ARBITRARY = "_token_id"
"""Suffix of the names of settings that are often changed after a model was loaded."""


def describe_host(host: nn.Module) -> HostRecord:
    """The record of a host, for `find_difference`."""
    record: dict[str, tuple[float, ...] | str] = {}
    for path, module in list_named_modules(host):
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if name == CONFIGURATION:
                settings = cast("Mapping[str, Any]", getattr(value, "__dict__", {}))
                record |= {f"{prefix}{key}": numbers for key, numbers in _list_numbers(name, settings)}
            elif not name.startswith("_"):
                record |= {f"{prefix}{key}": numbers for key, numbers in _list_numbers(name, value)}
        # Activations and the like.
        if not list(module.children()) and not list(module.parameters()) and not list(module.buffers()):
            record[f"{prefix}class"] = type(module).__name__
    persistent = host.state_dict().keys()
    for name, buffer in host.named_buffers():
        if name not in persistent and buffer.is_floating_point() and not buffer.is_meta:
            record[name] = _take_first(buffer)
    return record


def _list_numbers(name: str, value: Any) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Numbers in a module's attribute, by name; in mappings too."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[Any, Any]", value).items():
            if isinstance(key, str) and not key.startswith("_") and not key.endswith(_ARBITRARY):
                yield from _list_numbers(f"{name}.{key}", part)
    elif isinstance(value, int | float | tuple | list):
        parts = cast("Sequence[Any]", value if isinstance(value, tuple | list) else (value,))
        if parts and all(type(part) in (int, float) and math.isfinite(part) for part in parts):
            yield name, tuple(map(float, parts))


def _take_first(buffer: Tensor) -> tuple[float, ...]:
    """The first values along the last axis, with infinities as zeros."""
    row = buffer.detach().reshape(-1)[: min(BUFFER_VALUES, buffer.shape[-1] if buffer.dim() else 1)]
    values = cast("list[float]", torch.nan_to_num(row.double().cpu(), 0.0, 0.0, 0.0).tolist())
    return tuple(values)


def find_difference(saved: HostRecord, present: HostRecord) -> str | None:
    """The first place common to two hosts where their values differ; None if there is none."""
    for place, value in saved.items():
        other = present.get(place, value)
        if isinstance(value, str) or isinstance(other, str):
            if value != other:
                return place
        elif not all(math.isclose(*pair, rel_tol=ROUNDING, abs_tol=1e-12) for pair in zip(value, other, strict=False)):
            return place
    return None
