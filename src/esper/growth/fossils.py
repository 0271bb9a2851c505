"""Fossils: seeds as forward hooks of a plain host, made of torch operations only, so that it does not need Esper."""

from __future__ import annotations

import functools
import inspect
from inspect import Parameter
from operator import add, getitem
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.func import functional_call

from esper.errors import ExportError
from esper.growth.blueprints.registry import Context
from esper.growth.seed import Seed
from esper.growth.site import Site
from esper.numerics.module_state import keep_modes

PREFIX = "fossil_"
"""Prefix of the names of fossils in the submodules that they follow."""
TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Errors that `torch.export` raises for modules that it cannot trace."""
INPUT = (
    "what grew here reads the input of the whole network, which has not been called: call the network that finalize() "
    "returned and not its parts, or let another blueprint grow"
)
"""Key of the network's input in the dictionary that keeps it, and so the message of the KeyError if it is missing."""
_CHILD_ACCESS = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
"""Names used by modules that run all their children."""


class _Traced(nn.Module):
    """A seed for `torch.export`, called with features, and with the network's input if the seed needs it."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, *arguments: Tensor) -> Tensor:
        # A view that fails for lengths for which the graph was not made; broadcasting would accept some of them.
        return self.seed(arguments[0].reshape(arguments[0].shape), arguments[-1])


def trace_seed(seed: Seed, site: Site, slot: str) -> ExportedProgram:
    """Trace a seed at its site, in evaluation mode, for any batch size, and for other lengths if possible."""
    shapes = [site.shape, site.input_shape] if seed.context is Context.NETWORK else [site.shape]
    # The batch size differs from all other axes, so that torch does not treat them as the same symbol.
    batch = next(size for size in range(2, 16) if all(size not in shape for shape in shapes))
    axes = tuple({0: Dim.DYNAMIC, **dict.fromkeys(range(1, 1 + len(shape)), Dim.AUTO)} for shape in shapes)
    example = tuple(seed.alpha.new_zeros(batch, *shape) for shape in shapes)
    try:
        with keep_modes(seed):
            return export(_Traced(seed).eval(), example, dynamic_shapes=(axes,))
    except TRACING_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"torch.export cannot trace blueprint {seed.blueprint.name!r}, which grew in slot {slot!r} ({reason}): "
            "write its forward without Python branches on sizes or values, or save the growing model by esper.save"
        ) from error


def add_fossil(host: nn.Module, path: str, seed: Seed, site: Site, slot: str, place: int | str) -> None:
    """Run a seed after the submodule ``path`` of a host without slots, by a forward hook that is a graph.

    Its tensors are in a new child of the submodule, which only an `nn.Sequential` calls; there, the child has the hook.
    If the submodule runs all its children in its own way, they are attributes of it. ``place`` is the index or keyword
    of the network's input among the host's arguments.
    """
    followed, block = host.get_submodule(path), seed.blueprint.find_block()
    child = _find_unused_name(followed, PREFIX + seed.blueprint.name)
    runner, owner, prefix = followed, followed, f"{child}_"
    if not runs_children(followed):
        path, owner, prefix = f"{path}.{child}", nn.Identity().train(followed.training), ""
        followed.add_module(child, owner)
        runner = owner if type(followed).forward is nn.Sequential.forward else followed
    graph = fx.Graph()
    # `functional_call` unpacks arguments, which a graph cannot. It is an argument, or unpickling would call it.
    names = ("unpack", "module", "arguments", "keywords", "output")
    unpack, module, arguments, keywords, output = map(graph.placeholder, names)
    holder = module if owner is runner else graph.call_function(getattr, (module, child))
    in_tuple = site.layer is not None and site.layer.in_tuple
    features = graph.call_function(getitem, (output, 0)) if in_tuple else output
    if block is not None:
        owner.add_module("block", block)
        owner.register_buffer("alpha", seed.alpha)
        parameters = inspect.signature(followed.forward).parameters
        if [parameter.kind for parameter in parameters.values()] == [Parameter.POSITIONAL_OR_KEYWORD]:
            computed = graph.call_method("block", (holder, features))
        else:  # the block's output takes the place of its first argument, positional or not
            rest = graph.call_function(getitem, (arguments, slice(1, None)))
            named = graph.call_method("copy", (keywords,))
            graph.call_method("pop", (named, next(iter(parameters), ""), None))
            copied = graph.call_function(getattr, (holder, "block"))
            positional = graph.call_function(add, ((features,), rest))
            computed = graph.call_method("__call__", (unpack, copied, {}, positional, named))
        weight = graph.call_method("to", (graph.call_function(getattr, (holder, "alpha")), features))
        changed = graph.call_function(torch.lerp, (features, graph.call_method("to", (computed, features)), weight))
    else:
        program, inputs = trace_seed(seed, site, slot), [features]
        if seed.context is Context.NETWORK:
            kept = _find_unused_name(owner, f"{prefix}inputs")
            _relay_input(host, path, kept, place)
            inputs.append(graph.call_function(getitem, (graph.call_function(getattr, (holder, kept)), INPUT)))
        # The placeholders of the traced graph are inputs and tensors; its assertions name the traced dtype and device.
        state: dict[str, Any] = {**program.constants, **program.state_dict}
        copies, placeholders = dict[fx.Node, fx.Node](), program.graph.find_nodes(op="placeholder")
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.target is None:
                copies[node] = inputs.pop(0)
                continue
            short = spec.target.removeprefix("seed.").removeprefix("blueprint.").replace(".", "_")
            name, tensor = _find_unused_name(owner, prefix + short), state[spec.target]
            register = owner.register_parameter if isinstance(tensor, nn.Parameter) else owner.register_buffer
            register(name, tensor)
            copies[node] = graph.call_function(getattr, (holder, name))
        for node in list(program.graph.nodes):
            if not node.users and "assert" in node.name:
                program.graph.erase_node(node)
        (changed,) = cast("tuple[fx.Node]", graph.graph_copy(program.graph, copies))
        # In each call, the features' device and dtype replace those of the traced tensors.
        places = {seed.alpha.device: "device", seed.alpha.dtype: "dtype"}
        for node in list(graph.nodes):
            for index, value in (*enumerate(node.args), *node.kwargs.items()):
                if isinstance(value, torch.device | torch.dtype) and value in places:
                    with graph.inserting_before(node):
                        own = graph.call_function(getattr, (features, places[value]))
                    update = node.update_arg if isinstance(index, int) else node.update_kwarg
                    update(index, own)
    if in_tuple:
        rest = graph.call_function(getitem, (output, slice(1, None)))
        changed = graph.call_function(add, ((changed,), rest))
    graph.output(changed)
    hook = functools.partial(fx.GraphModule(nn.Module(), graph, class_name="Fossil"), functional_call)
    runner.register_forward_hook(hook, with_kwargs=True)


def _relay_input(host: nn.Module, path: str, attribute: str, place: int | str) -> None:
    """Keep the host's input in a dictionary of the submodule ``path``, under the key `INPUT`, only during a pass.

    So copies and files of the host contain no data, but `torch.utils.checkpoint` must not recompute the submodule.
    """
    setattr(host.get_submodule(path), attribute, dict[str, object]())
    # Each graph gets the dictionary from the submodule, as compiled code would treat a reference to it as another one.
    fill, clear = fx.Graph(), fx.Graph()
    module, arguments, keywords = map(fill.placeholder, ("module", "arguments", "keywords"))
    kept = fill.call_function(getattr, (fill.call_method("get_submodule", (module, path)), attribute))
    value = fill.call_function(getitem, (arguments if isinstance(place, int) else keywords, place))
    fill.call_method("update", (kept, {INPUT: value}))
    fill.output(None)
    module, _, _ = map(clear.placeholder, ("module", "arguments", "output"))
    kept = clear.call_function(getattr, (clear.call_method("get_submodule", (module, path)), attribute))
    clear.call_method("clear", (kept,))
    clear.output(None)
    host.register_forward_pre_hook(fx.GraphModule(nn.Module(), fill, class_name="KeepInput"), with_kwargs=True)
    host.register_forward_hook(fx.GraphModule(nn.Module(), clear, class_name="ForgetInput"), always_call=True)


def _find_unused_name(module: nn.Module, name: str) -> str:
    """``name`` with enough underscores to be unused: the module may have fossils of an earlier growth."""
    return name if not hasattr(module, name) else _find_unused_name(module, f"{name}_")


def runs_children(module: nn.Module) -> bool:
    """Whether a module may run all its children in its own way, so that another child would change its output."""
    if type(module).forward is nn.Sequential.forward:
        return False
    kinds = [
        kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and "torch.nn." not in kind.__module__
    ]
    codes = [method.__code__ for kind in kinds for method in vars(kind).values() if inspect.isfunction(method)]
    for code in codes:  # functions within functions are appended
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return is_container or any(not _CHILD_ACCESS.isdisjoint(code.co_names) for code in codes)
