"""Saved tensors: what a learner's checkpoint must hold to fit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from esper.errors import CheckpointError

LONGEST_NAME = 80
"""Of a tensor, in messages: names from a file may be of any length."""


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_kinds(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless names, shapes and types are the same."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise CheckpointError(f"the learner's checkpoint lacks {name}: it is of another version or policy")
        if name not in expected:
            raise CheckpointError(
                f"the learner's checkpoint holds {name[:LONGEST_NAME]!r}, which this policy has not: use its settings"
            )
        ours, theirs = _kind(expected[name]), _kind(found[name])
        if ours != theirs:
            raise CheckpointError(
                f"the learner's checkpoint holds {name} as {theirs} where this policy has {ours}: "
                "use the settings it was saved with"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
