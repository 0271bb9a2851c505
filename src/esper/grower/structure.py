"""What has grown in a model, without its values: enough to plant the same again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from esper.errors import CheckpointError, ConfigError
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import SeedTable

Structure = dict[str, dict[str, Any]]
"""By slot, of every seed: ``blueprint`` (its name), ``blend`` (a `Blend`) and ``fossilized``; plain values."""


def structure(model: GrowingModel) -> Structure:
    """Of ``model`` as it is."""
    return {
        name: {"blueprint": seed.blueprint.name, "blend": int(seed.blend), "fossilized": seed.fossilized}
        for name, seed in model.seeds.items()
    }


def regrow(model: GrowingModel, wanted: Mapping[str, Mapping[str, Any]]) -> None:
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


def require(model: GrowingModel, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a model of another structure.

    Raises:
        CheckpointError: a slot holds another seed than ``wanted``, or none.
    """
    present = structure(model)
    for name in (*model.slots, *wanted):
        if present.get(name) != wanted.get(name):
            raise CheckpointError(
                f"slot {name!r} holds {_told(present.get(name))}, but held {_told(wanted.get(name))} when the grower's "
                "state was saved: restore the model first"
            )


def require_planted(model: GrowingModel, table: SeedTable) -> None:
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


def _told(seed: Mapping[str, Any] | None) -> str:
    if seed is None:
        return "no seed"
    kind = "fossilized" if seed["fossilized"] else "live"
    return f"a {kind} {seed['blueprint']} ({Blend(seed['blend']).name.lower()})"
