"""A run's state as tensors and JSON values, which is what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from esper.errors import CheckpointError
from esper.grower.practice.growth import Growth
from esper.grower.state_dict import pack, regrow, structure, unpack
from esper.rl.saved import under

_MODEL, _OPTIMIZER = "model.", "optimizer."
_GROWER = "grower"
_SEEDS = "seeds"

State = tuple[dict[str, Tensor], dict[str, Any]]


def capture(growth: Growth) -> State:
    """All that decides how the run goes on."""
    tensors = {f"{_MODEL}{name}": value for name, value in growth.model.state_dict().items()}
    moments: dict[int, dict[str, Tensor]] = growth.optimizer.state_dict()["state"]
    for index, values in moments.items():
        tensors |= {f"{_OPTIMIZER}{index}.{name}": value for name, value in values.items()}
    tensors[_GROWER] = pack(growth.grower.state_dict())
    return tensors, {_SEEDS: structure(growth.model)}


def restore(growth: Growth, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Go on where `capture` was called; ``growth`` was made anew from the same settings.

    Raises:
        CheckpointError: it is of other settings.
    """
    if _SEEDS not in state or _GROWER not in tensors:
        raise CheckpointError("the checkpoint is of no run of `esper grow`: give the directory of one")
    regrow(growth.model, state[_SEEDS])
    try:
        growth.model.load_state_dict(under(_MODEL, tensors))
    except RuntimeError as error:
        raise CheckpointError("the checkpoint is of another host: use the settings that the run had") from error
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in under(_OPTIMIZER, tensors).items():
        index, _, part = name.partition(".")
        moments.setdefault(int(index), {})[part] = value
    growth.optimizer.load_state_dict({**growth.optimizer.state_dict(), "state": moments})
    growth.grower.load_state_dict(unpack(tensors[_GROWER]))
