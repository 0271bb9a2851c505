"""Whether a network's outputs at one position depend on later positions of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor


def is_causal(network: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Whether another last position of ``inputs [B, T, ...]`` leaves the outputs of all earlier ones as they were.

    Only of networks whose output has the same T positions along axis 1 can that be said; of others it is False, and so
    of inputs with a single position. It is True of a network that mixes no positions, and of one whose outputs do not
    change at all, perhaps because its last layer is still zero: either may be a language model, which nothing that
    grows may spoil.
    """
    if inputs.dim() < 2 or inputs.shape[1] < 2:
        return False
    before = output_tensor(network(inputs))
    if before is None or before.dim() != 3 or before.shape[1] != inputs.shape[1]:
        return False
    after = output_tensor(network(_changed(inputs)))
    assert after is not None
    return torch.allclose(before[:, :-1], after[:, :-1])


def _changed(inputs: Tensor) -> Tensor:
    """With another last position: an index that occurs elsewhere in the input if one does, or random numbers."""
    changed = inputs.clone()
    if inputs.is_floating_point():
        noise = torch.randn(inputs[:, -1].shape, generator=torch.Generator().manual_seed(0))
        changed[:, -1] = noise.to(inputs)
    else:
        last = inputs[:, -1]
        others = inputs[inputs != last.unsqueeze(1)]
        changed[:, -1] = others[0] if len(others) else (last == 0).to(inputs.dtype)
    return changed


def output_tensor(returned: Any) -> Tensor | None:
    """What a network returned, if it is a tensor, or the first tensor of a tuple or mapping that has axes."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        returned = tuple(cast("Mapping[str, Any]", returned).values())
    parts = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
    return next((part for part in parts if isinstance(part, Tensor) and part.dim() > 0), None)
