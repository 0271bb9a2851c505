"""Plain state as one tensor of bytes, for containers that hold nothing but tensors."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.errors import CheckpointError

_REST = "rest"
"""Name of the JSON beside the numbered tensors."""
_TENSOR = "tensor"
"""Only key of the object that stands for a tensor in the JSON."""


def pack(state: Any) -> Tensor:
    """What `esper.state.to_plain` returned, as uint8 ``[n]``: a safetensors file whose one odd tensor is JSON."""
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_without_tensors(state, tensors)).encode()
    tensors[_REST] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What `pack` packed, with tensors on the CPU. Nothing in it is run.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        tensors = load(packed.numpy(force=True).tobytes())
        rest = json.loads(tensors[_REST].numpy().tobytes())
        return _with_tensors(rest, tensors)
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError("the saved state of growth is damaged: use an earlier checkpoint") from error


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _without_tensors(part, tensors) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_without_tensors(part, tensors) for part in cast("list[Any]", value)]
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        if list(parts) == [_TENSOR]:
            return tensors[parts[_TENSOR]]
        return {key: _with_tensors(part, tensors) for key, part in parts.items()}
    if isinstance(value, list):
        return [_with_tensors(part, tensors) for part in cast("list[Any]", value)]
    return value
