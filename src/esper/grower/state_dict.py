"""What has grown in a model as plain values: enough to plant the same again, and to travel in the model's state dict.

Trainers such as Lightning's save and load nothing else of ours than the state dict, which holds nothing but tensors: so
`esper.serialization.state_files.pack` makes one tensor of plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import CheckpointError, ConfigError, SlotError
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import SeedTable
from esper.serialization.state_files import Stateful, pack_state, unpack_state

Structure = dict[str, dict[str, Any]]
"""By slot, of every seed: ``blueprint`` (its name), ``blend`` (a `Blend`) and ``fossilized``; plain values."""


def structure(model: GrowingModel) -> Structure:
    """The structure of ``model`` as it is."""
    return {
        name: {"blueprint": seed.blueprint.name, "blend": int(seed.blend), "fossilized": seed.fossilized}
        for name, seed in model.seeds.items()
    }


def plant_structure(model: GrowingModel, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Give ``model`` the structure ``wanted``; what grew otherwise goes. Fresh seeds await their values, at alpha 0.

    Raises:
        CheckpointError: the model has no slot of a name.
        SlotError, UnknownBlueprintError: a slot does not offer the blueprint.
    """
    strange = [name for name in wanted if name not in model.slots]
    if strange:
        raise CheckpointError(
            f"something grew in slot {strange[0]!r} when this state was saved, but the model has only "
            f"{', '.join(model.slots)}: attach the same slots"
        )
    present = structure(model)
    for slot in model.slots.values():
        if present.get(slot.name) == wanted.get(slot.name):
            continue
        slot.remove()
        if slot.name not in wanted:
            continue
        seed = wanted[slot.name]
        enabled, slot.enabled = slot.enabled, True
        try:
            slot.germinate(seed["blueprint"], torch.Generator(), blend=Blend(seed["blend"]))
        finally:
            slot.enabled = enabled
        if seed["fossilized"]:
            slot.fossilize()


def require_structure(model: GrowingModel, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a model of another structure.

    Raises:
        CheckpointError: a slot holds another seed than ``wanted``, or none.
    """
    present = structure(model)
    for name in (*model.slots, *wanted):
        here, then = present.get(name), wanted.get(name)
        if here != then:
            raise CheckpointError(
                f"slot {name!r} holds {_describe(here)}, but held {_describe(then)} when the grower's state was saved: "
                "restore the model first"
            )


def require_same_slots(model: GrowingModel, table: SeedTable) -> None:
    """Refuse a model whose seeds came or went without its grower's doing.

    Raises:
        ConfigError: a slot holds a seed that the table ``[1, S]`` does not know of, or none where it knows one.
    """
    for owns, slot in zip(table.owning[0].tolist(), model.slots.values(), strict=True):
        if owns != (slot.seed is not None):
            raise ConfigError(
                f"slot {slot.name!r} {'has lost its seed' if owns else 'holds a seed'} without its grower's doing: let "
                "the grower alone plant and prune, or load its state where training goes on"
            )


def _describe(seed: Mapping[str, Any] | None) -> str:
    if seed is None:
        return "no seed"
    kind = "fossilized" if seed["fossilized"] else "live"
    return f"a {kind} {seed['blueprint']} ({Blend(seed['blend']).name.lower()})"


KEY = "growth"
"""The entry that a model's state dict gains."""


class GrowthInStateDict:
    """Makes ``model.state_dict()`` say what has grown, and ``model.load_state_dict(...)`` plant the same first.

    The state dict gains one tensor of bytes, and names each tensor once that the model uses under several names, as
    files of safetensors must. Parts that are `carry`-ed, such as a grower, are saved and loaded with it. Copies of the
    model carry their seeds only.
    """

    def __init__(self, model: GrowingModel) -> None:
        _require_unshared(model)
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
        _require_unshared(model)
        state = {
            "seeds": describe_structure(model),
            "twins": _drop_twins(state_dict, prefix),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        state_dict[prefix + KEY] = pack_state(state)

    def _take(self, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        assert isinstance(model, GrowingModel)
        packed = state_dict.pop(prefix + KEY, None)
        if packed is None:
            return
        state = unpack_state(packed)
        state_dict.update({prefix + twin: state_dict[prefix + name] for twin, name in state["twins"].items()})
        plant_structure(model, state["seeds"])
        self._arrived = state["parts"]
        self._deliver()

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_parts": {}, "_arrived": {}}


def _require_unshared(model: GrowingModel) -> None:
    if model.sharded:
        raise SlotError(
            "processes share the model's parameters (FSDP2), and its state dict cannot hold what has grown in all: "
            "save it by torch.distributed.checkpoint, and each process's grower.state_dict() by itself, which the "
            "callbacks for trainers do not"
        )


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
