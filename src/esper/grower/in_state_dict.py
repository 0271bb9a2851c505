"""Growth in a model's own state dict, for trainers that save and load nothing else of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from esper.grower.packing import pack, unpack
from esper.grower.structure import regrow, structure
from esper.growth.model import GrowingModel
from esper.state import Stateful

KEY = "growth"
"""The entry that a model's state dict gains."""


class GrowthInStateDict:
    """Makes ``model.state_dict()`` say what has grown, and ``model.load_state_dict(...)`` plant the same first.

    The state dict gains one tensor of bytes, and names each tensor once that the model uses under several names, as
    files of safetensors must. Parts that are `carry`-ed, such as a grower, are saved and loaded with it. Copies of the
    model carry their seeds only.
    """

    def __init__(self, model: GrowingModel) -> None:
        self._parts: dict[str, Stateful] = {}
        self._arrived: dict[str, dict[str, Any]] = {}
        """States that were loaded before the part was there."""
        model.register_state_dict_post_hook(self)
        model.register_load_state_dict_pre_hook(self._take)

    def carry(self, name: str, part: Stateful) -> None:
        """Save and load ``part`` with the model from now on; it gets the state that was loaded last at once."""
        self._parts[name] = part
        self._deliver()

    def _deliver(self) -> None:
        for name in self._parts.keys() & self._arrived.keys():
            self._parts[name].load_state_dict(self._arrived.pop(name))

    def __call__(self, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Add to ``state_dict``, as a hook of the model; torch wants an object here, not a method."""
        assert isinstance(model, GrowingModel)
        state = {
            "seeds": structure(model),
            "twins": _drop_twins(state_dict, prefix),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        state_dict[prefix + KEY] = pack(state)

    def _take(self, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        assert isinstance(model, GrowingModel)
        packed = state_dict.pop(prefix + KEY, None)
        if packed is None:
            return
        state = unpack(packed)
        state_dict.update({prefix + twin: state_dict[prefix + name] for twin, name in state["twins"].items()})
        regrow(model, state["seeds"])
        self._arrived = state["parts"]
        self._deliver()

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_parts": {}, "_arrived": {}}


def _drop_twins(state_dict: dict[str, Tensor], prefix: str) -> dict[str, str]:
    """Remove all but the first name of every tensor; the name that stays by those that went, without ``prefix``."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    twins: dict[str, str] = {}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        tensor = state_dict[name]
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        kept = first.setdefault(place, name) if tensor.numel() else name
        if kept != name:
            twins[name.removeprefix(prefix)] = kept.removeprefix(prefix)
            del state_dict[name]
    return twins
