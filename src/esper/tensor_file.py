"""Tensors as safetensors, whose header is checked before any tensor is built: it may claim anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from esper.parsing import parse_json
from esper.settings import Settings

MOST_HEADER_BYTES = 4 * 2**20
MOST_ELEMENTS = 2**40
"""Of a tensor, empty axes counted as one: larger products may overflow."""
_LENGTH_BYTES = 8


def _sizeable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(length, 1) for length in shape) > MOST_ELEMENTS:
        raise ValueError("a tensor is too large")
    return shape


_Length = Annotated[int, Field(strict=True, ge=0)]


class _Entry(Settings):
    """What the header says of a tensor."""

    dtype: Literal["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"]
    shape: Annotated[tuple[_Length, ...], Field(max_length=16), AfterValidator(_sizeable)]
    data_offsets: tuple[_Length, _Length]


_HEADER = TypeAdapter(dict[str, _Entry])


def decode(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in ``data``, on the CPU.

    Raises:
        ValueError: it is not a whole safetensors file with tensors of ordinary types.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(len(data) - _LENGTH_BYTES, MOST_HEADER_BYTES):
        raise ValueError("its header is too long")
    try:
        _HEADER.validate_python(parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        return load(data)
    except ValidationError as error:
        raise ValueError(f"its header is wrong: {error.errors()[0]['msg']}") from error
    except SafetensorError as error:
        raise ValueError("its header does not suit its contents") from error


def take_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
