"""Make an ordinary module of a growing model: fossils folded in, all else dropped."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING

from torch import fx, nn

from esper.growth.fossil_graph import TracedFossil, trace
from esper.growth.input_relay import relay_input
from esper.growth.pretrained import refuse_saving

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Begins the names of fossils in the submodules that they follow."""
_ASKING = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
"""What a module asks of itself that runs whatever it holds."""


def finalize(model: GrowingModel) -> nn.Module:
    """A copy of the host with its fossils folded in; see `GrowingModel.finalize`.

    Raises:
        ExportError: `torch.export` cannot trace a fossil's blueprint.
    """
    grown = copy.deepcopy(model)
    grown.release()
    for slot in grown.slots.values():
        if slot.seed is not None and slot.seed.fossilized:
            traced = trace(slot.seed, slot.site, slot.name)
            _fold(grown.host, slot.name, type(slot.seed.blueprint).name, traced, grown.tap.place)
    refuse_saving(grown.host, [name for name, seed in grown.seeds.items() if seed.fossilized])
    return grown.host


def _fold(host: nn.Module, behind: str, kind: str, traced: TracedFossil, place: int | str) -> None:
    """Let a traced fossil follow the host's submodule ``behind``."""
    followed = host.get_submodule(behind)
    fossil = _unused(followed, PREFIX + kind)
    if _runs_what_it_holds(followed):
        owner, path, prefix = followed, behind, f"{fossil}_"
    else:
        # It returns what it is given, and its hook makes of that what the fossil does.
        owner, path, prefix = nn.Identity(), f"{behind}.{fossil}", ""
        count = sum(tensor.numel() for tensor in traced.tensors.values() if isinstance(tensor, nn.Parameter))
        vars(owner)["extra_repr"] = functools.partial(str, f"what grew: {kind}, {count} parameters")
        followed.add_module(fossil, owner)
        if type(followed).forward is not nn.Sequential.forward:  # which runs it by itself
            followed.register_forward_hook(_running(fossil))
    inputs = None
    if traced.reads_inputs:
        inputs = _unused(owner, f"{prefix}inputs")
        relay_input(host, path, inputs, place)
    names: dict[str, str] = {}
    for name, tensor in traced.tensors.items():
        names[name] = _unused(owner, prefix + name.removeprefix("blueprint.").replace(".", "_"))
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(names[name], tensor)
        else:
            owner.register_buffer(names[name], tensor)
    owner.register_forward_hook(traced.hook(names, inputs))


def _runs_what_it_holds(module: nn.Module) -> bool:
    """Whether a module may run all that is registered in it, in a way of its own, so that a fossil there might disturb.

    It may if it is a container with a forward pass, or if a method of its class asks for its children.
    """
    if type(module).forward is nn.Sequential.forward:
        return False
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return True
    own = (kind for kind in type(module).__mro__ if kind is not nn.Module and issubclass(kind, nn.Module))
    methods = (method for kind in own for method in vars(kind).values() if inspect.isfunction(method))
    return any(not _ASKING.isdisjoint(method.__code__.co_names) for method in methods)


def _running(submodule: str) -> fx.GraphModule:
    """A forward hook that gives the output to a submodule of the module that it hooks."""
    graph = fx.Graph()
    module, _, features = (graph.placeholder(name) for name in ("module", "arguments", "features"))
    graph.output(graph.call_method(submodule, (module, features)))
    return fx.GraphModule(nn.Module(), graph, class_name="RunFossil")


def _unused(module: nn.Module, wanted: str) -> str:
    """An attribute that ``module`` does not have yet; it may carry fossils of an earlier growth."""
    taken = set(dir(module))
    while wanted in taken:
        wanted += "_"
    return wanted
