"""Make an ordinary module of a growing model: fossils folded in, all else dropped."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from esper.growth.fossil_graph import trace
from esper.growth.input_relay import relay_input
from esper.growth.pretrained import refuse_saving

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Begins the names of a fossil's tensors in the submodule that it follows."""


def finalize(model: GrowingModel) -> nn.Module:
    """A copy of the host with its fossils folded in; see `GrowingModel.finalize`.

    Raises:
        ExportError: `torch.export` cannot trace a fossil's blueprint.
    """
    grown = copy.deepcopy(model)
    grown.release()
    for slot in grown.slots.values():
        seed = slot.seed
        if seed is None or not seed.fossilized:
            continue
        traced = trace(seed, slot.site, slot.name)
        behind = grown.host.get_submodule(slot.name)
        inputs = None
        if traced.reads_inputs:
            inputs = _unused(behind, "inputs")
            relay_input(grown.host, slot.name, inputs, grown.tap.place)
        names: dict[str, str] = {}
        for name, tensor in traced.tensors.items():
            names[name] = _unused(behind, name.removeprefix("blueprint."))
            if isinstance(tensor, nn.Parameter):
                behind.register_parameter(names[name], tensor)
            else:
                behind.register_buffer(names[name], tensor)
        behind.register_forward_hook(traced.hook(names, inputs))
    refuse_saving(grown.host, [name for name, seed in grown.seeds.items() if seed.fossilized])
    return grown.host


def _unused(module: nn.Module, name: str) -> str:
    """An attribute that ``module`` does not have yet; it may carry fossils of an earlier growth."""
    wanted = PREFIX + name.replace(".", "_")
    taken = set(dir(module))
    while wanted in taken:
        wanted += "_"
    return wanted
