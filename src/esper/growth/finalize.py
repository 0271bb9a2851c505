"""Make an ordinary module of a growing model: what stays is folded in, all else dropped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from torch import nn

from esper.growth.fossil_graph import trace
from esper.growth.input_relay import relay_input
from esper.growth.unfinished import Unfinished, folded

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Begins the names of a fossil's tensors in the submodule that it follows."""


def finalize(model: GrowingModel, unfinished: Unfinished) -> nn.Module:
    """A copy of the host with its seeds folded in; see `GrowingModel.finalize`.

    Raises:
        ExportError: `torch.export` cannot trace a seed's blueprint.
        SlotError: there are unfinished seeds, which ``unfinished`` forbids.
    """
    kept = folded(model, unfinished)
    grown = copy.deepcopy(model)
    grown.release()
    for name in kept:
        slot, seed = grown.slots[name], grown.seeds[name]
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
        _keep_padded(grown.host, slot.name)
    return grown.host


def _keep_padded(host: nn.Module, submodule: str) -> None:
    """Let torch's encoder around ``submodule`` go on with padded examples in eval mode, as it does in training.

    It would make them a nested tensor, which a graph cannot read. At padding, where it then leaves zeros, come other
    values that mean nothing, as in training.
    """
    for name, module in cast(Iterator[tuple[str, nn.Module]], host.named_modules()):
        if isinstance(module, nn.TransformerEncoder) and submodule.startswith(f"{name}." if name else ""):
            module.enable_nested_tensor = module.use_nested_tensor = False


def _unused(module: nn.Module, name: str) -> str:
    """An attribute that ``module`` does not have yet; it may carry fossils of an earlier growth."""
    wanted = PREFIX + name.replace(".", "_")
    taken = set(dir(module))
    while wanted in taken:
        wanted += "_"
    return wanted
