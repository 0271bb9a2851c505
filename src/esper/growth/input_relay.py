"""Bring a network's input to a later submodule by hooks of torch alone, for fossils that read it."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import Tensor, fx, nn

from esper.growth.probe import Arguments

INPUT = (
    "what grew here reads the input of the whole network, which has not been called: call the network that finalize() "
    "returned and not its parts, or let another blueprint grow"
)
"""Key of the input, and what a KeyError says where it is not."""


def input_place(arguments: Arguments) -> int | str:
    """Where among a host's arguments its input is, which is the first tensor: an index, or the name of a keyword."""
    if isinstance(arguments, Tensor):
        return 0
    named = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    return next(place for place, argument in named if isinstance(argument, Tensor))


def relay_input(host: nn.Module, submodule: str, attribute: str, place: int | str) -> None:
    """While ``host`` runs, let ``submodule`` have the host's input as only value of a dictionary, under `INPUT`.

    The hooks are `fx.GraphModule`s, so they copy, pickle, compile and export with the host. When the host has run, the
    dictionary is emptied: a copy or a file of the host holds no data. So `torch.utils.checkpoint` must not run the
    submodule again later.

    Args:
        host: Gets two hooks.
        submodule: Its name in the host.
        attribute: What the dictionary is called there.
        place: Of the input among the host's arguments: an index, or the name of a keyword.
    """
    setattr(host.get_submodule(submodule), attribute, dict[str, object]())
    host.register_forward_pre_hook(_keeping(submodule, attribute, place), with_kwargs=True)
    host.register_forward_hook(_forgetting(submodule, attribute), always_call=True)


def _keeping(submodule: str, attribute: str, place: int | str) -> fx.GraphModule:
    graph = fx.Graph()
    module, arguments, keywords = (graph.placeholder(name) for name in ("module", "arguments", "keywords"))
    given = arguments if isinstance(place, int) else keywords
    kept = _kept(graph, module, submodule, attribute)
    graph.call_method("update", (kept, {INPUT: graph.call_function(operator.getitem, (given, place))}))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="KeepInput")


def _forgetting(submodule: str, attribute: str) -> fx.GraphModule:
    graph = fx.Graph()
    module, _, _ = (graph.placeholder(name) for name in ("module", "arguments", "output"))
    graph.call_method("clear", (_kept(graph, module, submodule, attribute),))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="ForgetInput")


def _kept(graph: fx.Graph, module: fx.Node, submodule: str, attribute: str) -> fx.Node:
    # By way of the submodule: compiled code would take a reference of the host's own for another dictionary.
    return graph.call_function(getattr, (graph.call_method("get_submodule", (module, submodule)), attribute))
