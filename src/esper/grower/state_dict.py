"""The structure that has grown in a model, as plain values, and a hook that saves it in the model's state dict.

Trainers such as Lightning's save and load nothing of a model but its state dict, which holds only tensors. So plain
values are packed into one tensor of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import CheckpointError, ConfigError, SlotError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import SeedTable
from esper.serialization.state_files import Stateful, pack_state, unpack_state

Structure = dict[str, dict[str, Any]]
"""By slot, for each module: ``blueprint`` (its name), ``blend`` (a `Blend`) and ``fossilized``; plain values."""
KEY = "growth"
"""The entry that a model's state dict gains."""


def describe_structure(model: GrowingModel) -> Structure:
    """The modules in ``model`` as plain values."""
    return {
        name: {"blueprint": seed.blueprint.name, "blend": int(seed.blend), "fossilized": seed.fossilized}
        for name, seed in model.seeds.items()
    }


def plant_structure(model: GrowingModel, structure: Mapping[str, Mapping[str, Any]]) -> None:
    """Plant the modules of ``structure`` in ``model``, and remove all others; after an error nothing has changed.

    New modules have alpha 0 and arbitrary values, which are to be loaded.
    """
    missing = [name for name in structure if name not in model.slots]
    if missing:
        raise CheckpointError(
            f"something grew in slot {missing[0]!r} when this state was saved, but the model has only "
            f"{', '.join(model.slots)}: attach the same slots"
        )
    # Make all modules before any is planted. A slot where nothing may germinate now may have one from before.
    current, seeds = describe_structure(model), model.seeds
    changed = {name: module for name, module in structure.items() if current.get(name) != module}
    for name, module in changed.items():
        seeds[name] = model.slots[name].make_seed(module["blueprint"], torch.Generator(), Blend(module["blend"]))
    replace_seeds(model, {name: seeds[name] for name in structure})
    for name, module in changed.items():
        if module["fossilized"]:
            model.slots[name].fossilize()


def replace_seeds(model: GrowingModel, seeds: Mapping[str, Seed]) -> None:
    """Replace all seeds of a model with ``seeds``, by slot. A seed that stays in its slot is not touched."""
    slots = model.slots.values()
    for slot in slots:
        slot.require_not_disabled()
    former, optimizer = model.seeds, model.optimizer_link.optimizer
    moments = {} if optimizer is None else dict(optimizer.state)

    def plant_all(seeds: Mapping[str, Seed]) -> None:
        changed = [slot for slot in slots if slot.seed is not seeds.get(slot.name)]
        for slot in changed:
            slot.remove()
        for slot in changed:
            if slot.name in seeds:
                slot.plant(seeds[slot.name])

    try:
        plant_all(seeds)
    except SlotError:
        plant_all(former)
        if optimizer is not None:
            # Removed parameters have lost their moments.
            parameters = [parameter for seed in former.values() for parameter in seed.parameters()]
            optimizer.state.update({key: moments[key] for key in parameters if key in moments})
        raise


def require_structure(model: GrowingModel, structure: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a model of another structure."""
    current = describe_structure(model)
    for name in (*model.slots, *structure):
        if current.get(name) != structure.get(name):
            raise CheckpointError(
                f"slot {name!r} holds {_describe_module(current.get(name))}, but held "
                f"{_describe_module(structure.get(name))} when the grower's state was saved: restore the model first"
            )


def _describe_module(module: Mapping[str, Any] | None) -> str:
    if module is None:
        return "no seed"
    kind = "fossilized" if module["fossilized"] else "live"
    return f"a {kind} {module['blueprint']} ({Blend(module['blend']).name.lower()})"


def require_same_slots(model: GrowingModel, table: SeedTable) -> None:
    """Refuse a model in which something else than its grower has planted or pruned."""
    for owns, slot in zip(table.owning[0].tolist(), model.slots.values(), strict=True):
        if owns != (slot.seed is not None):
            raise ConfigError(
                f"slot {slot.name!r} {'lost its seed' if owns else 'has a seed'} that the grower did not "
                f"{'prune' if owns else 'plant'}: let only the grower plant and prune, or load its state to resume"
            )


class GrowthInStateDict:
    """Adds what has grown to ``model.state_dict()``; ``model.load_state_dict(...)`` then plants it before it loads.

    The state dict gains one tensor of bytes. A tensor that the model uses under several names is saved under the first
    one only, as files of safetensors require. Parts that were added by `add_part`, such as a grower, are saved and
    loaded with the model. A copy of the model has its modules only.
    """

    def __init__(self, model: GrowingModel) -> None:
        self._parts: dict[str, Stateful] = {}
        self._pending: dict[str, dict[str, Any]] = {}
        """Loaded states of parts that are not added yet."""
        model.register_state_dict_post_hook(self)
        model.planters.append(self._load_growth)

    def add_part(self, name: str, part: Stateful) -> None:
        """Save and load ``part`` with the model from now on; a state loaded before is restored now."""
        self._parts[name] = part
        self._load_parts()

    def _load_parts(self) -> None:
        for name in self._parts.keys() & self._pending.keys():
            self._parts[name].load_state_dict(self._pending.pop(name))

    def __call__(self, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Add what has grown to ``state_dict``. The hook is the object itself: torch sets an attribute on hooks."""
        assert isinstance(model, GrowingModel)
        state = {
            "seeds": describe_structure(model),
            "twins": _remove_aliases(state_dict, prefix),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        state_dict[prefix + KEY] = pack_state(state)

    def _load_growth(self, model: GrowingModel, state_dict: dict[str, Tensor], prefix: str) -> None:
        packed = state_dict.pop(prefix + KEY, None)
        if packed is None:
            return
        state = unpack_state(packed)
        # Aliases back first, since torch requires every name; then modules, so that their values have a place.
        state_dict.update({prefix + alias: state_dict[prefix + name] for alias, name in state["twins"].items()})
        former = model.seeds
        plant_structure(model, state["seeds"])
        self._pending = state["parts"]
        try:
            self._load_parts()
        except Exception:
            replace_seeds(model, former)
            raise

    def __getstate__(self) -> Mapping[str, Any]:
        # Copies and pickles: a grower belongs to the original model.
        return {**self.__dict__, "_parts": {}, "_pending": {}}


def _remove_aliases(state_dict: dict[str, Tensor], prefix: str) -> dict[str, str]:
    """Remove all but the first name of every tensor; returns first names by removed ones, without ``prefix``."""
    first_names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        tensor = state_dict[name]
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        # Empty tensors have no memory by which they could be recognised.
        first = first_names.setdefault(memory, name) if tensor.numel() else name
        if first != name:
            aliases[name.removeprefix(prefix)] = first.removeprefix(prefix)
            del state_dict[name]
    return aliases
