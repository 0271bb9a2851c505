"""A seed as torch operations alone, without the classes that it was made of: a fossil, and what brings it its input."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.func import functional_call

from esper.errors import ExportError
from esper.growth.blueprints.registry import Context, LayerCall
from esper.growth.seed import Seed
from esper.growth.side_pass import keep_modes
from esper.growth.site import CHANNELS_LAST, Layout, Site

TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What `torch.export` raises of modules that it cannot trace."""


@dataclass(frozen=True)
class TracedFossil:
    """What a fossil computes, as a graph of torch operations."""

    program: ExportedProgram
    tensors: dict[str, Tensor]
    """Its parameters, buffers and constants."""
    reads_inputs: bool
    """Whether it reads the network's input."""

    def hook(self, names: Mapping[str, str], inputs: str | None) -> fx.GraphModule:
        """A forward hook that reads the tensors as attributes of the module that it hooks.

        Args:
            names: Of attributes, by the names in `tensors`.
            inputs: Name of the attribute in which `relay_input` keeps the network's input; None: that is not read.
        """
        graph = fx.Graph()
        module, _, features = (graph.placeholder(name) for name in ("module", "arguments", "features"))
        read = [features]
        if inputs is not None:
            read.append(graph.call_function(operator.getitem, (_attribute(graph, module, inputs), INPUT)))
        tensors = iter(read)
        copies: dict[fx.Node, fx.Node] = {}
        targets = {spec.arg.name: spec.target for spec in self.program.graph_signature.input_specs}
        like = _Like(graph, features, self.tensors["alpha"])
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                target = targets[node.name]
                copies[node] = (
                    next(tensors) if target is None else _attribute(graph, module, names[_strip_prefix(target)])
                )
            elif node.op == "output":
                graph.output(copies[node.args[0][0]])
            elif not is_assertion(node):
                copies[node] = like.follow(graph.node_copy(node, copies.__getitem__))
        return fx.GraphModule(self.program.graph_module, graph, class_name="Fossil")


def trace(seed: Seed, site: Site, slot: str) -> TracedFossil:
    """Trace a seed at its site, for batches of any size, and for other lengths where the blueprint allows it.

    A graph computes the same in either mode, so it is made of what the seed does in evaluation mode.

    Raises:
        ExportError: that cannot be done.
    """
    kind = type(seed.blueprint)
    shapes = [site.shape, site.input_shape] if kind.context is Context.NETWORK else [site.shape]
    # A batch unlike all other axes, so that none is taken to be the same.
    batch = next(size for size in range(2, 16) if all(size not in shape for shape in shapes))
    example = tuple(seed.alpha.new_zeros(batch, *shape) for shape in shapes)
    axes = [{0: Dim.DYNAMIC, **dict.fromkeys(_lengths(shape, site.layout), Dim.AUTO)} for shape in shapes]
    try:
        with keep_modes(seed):
            program = export(_Traced(seed).eval(), example, dynamic_shapes=(tuple(axes),))
    except TRACING_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"torch.export cannot trace blueprint {kind.name!r}, which grew in slot {slot!r} ({reason}): "
            "write its forward without Python branches on sizes or values, or save the growing model by esper.save"
        ) from error
    held: dict[str, Any] = {**program.constants, **program.state_dict}
    tensors = {
        spec.target: held[spec.target] for spec in program.graph_signature.input_specs if spec.target is not None
    }
    return TracedFossil(
        program, {_strip_prefix(name): tensor for name, tensor in tensors.items()}, kind.context is Context.NETWORK
    )


def _lengths(shape: tuple[int, ...], layout: Layout) -> list[int]:
    """The axes of a batch of such examples that are neither the batch's nor the channels'."""
    channels = len(shape) if layout in CHANNELS_LAST else 1
    return [axis for axis in range(1, len(shape) + 1) if axis != channels]


class _Traced(nn.Module):
    """A seed as `torch.export` is to see it: given features, and the network's input if it reads that."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, *given: Tensor) -> Tensor:
        features, inputs = given[0], given[-1]
        # A view that fails at lengths for which the graph was not made; some would pass otherwise by broadcasting.
        features = features.reshape(features.shape)
        call = LayerCall((features,), {}) if self.seed.reads is Context.CALL else inputs
        return self.seed(features, call)


def _strip_prefix(target: str) -> str:
    """The name of a seed's tensor, by that in `_Traced`."""
    return target.removeprefix("seed.")


class _Like:
    """Replaces the device and the type of the traced tensors by those of the features, whatever these will be."""

    def __init__(self, graph: fx.Graph, features: fx.Node, traced: Tensor) -> None:
        self._graph, self._features = graph, features
        self._replaced = {traced.device: "device", traced.dtype: "dtype"}

    def follow(self, node: fx.Node) -> fx.Node:
        """The node, whose arguments follow the features."""
        with self._graph.inserting_before(node):
            node.args = tuple(self._replace(argument) for argument in node.args)
            node.kwargs = {name: self._replace(argument) for name, argument in node.kwargs.items()}
        return node

    def _replace(self, argument: Any) -> Any:
        if isinstance(argument, torch.device | torch.dtype) and argument in self._replaced:
            return _attribute(self._graph, self._features, self._replaced[argument])
        return argument


def _attribute(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    return graph.call_function(getattr, (node, name))


def is_assertion(node: fx.Node) -> bool:
    """Whether the node only asserts that a tensor is of the traced type and device."""
    return not node.users and "assert" in node.name


BLOCK, ALPHA = "block", "alpha"
"""What `mix_alone` and `mix_in_block` run, and how much that counts, in the module that holds both."""


def mix_alone() -> fx.GraphModule:
    """A forward hook of a module that holds a block: what it returns is ``h``; ``(1 - alpha) * h + alpha * block(h)``.

    Unlike that of `mix_in_block` it compiles as one graph.
    """
    graph = fx.Graph()
    module, _, features = (graph.placeholder(name) for name in ("module", "arguments", "features"))
    _mix(graph, module, features, graph.call_method(BLOCK, (module, features)))
    return fx.GraphModule(nn.Module(), graph, class_name="MixAlone")


def mix_in_block(fossil: str, first: str) -> functools.partial[Tensor]:
    """A forward hook, with keywords, of a block that holds a copy of itself in its submodule ``fossil``.

    What the block returned is ``h``; it returns ``(1 - alpha) * h + alpha * copy(h, ...)``, and the copy is called with
    all other arguments that the block was called with. ``first`` is what the block calls its first argument.
    """
    graph = fx.Graph()
    # A graph cannot unpack arguments: `functional_call` does, which is given to it, lest unpickling call it.
    names = ("unpack", "module", "arguments", "keywords", "features")
    unpack, module, arguments, keywords, features = map(graph.placeholder, names)
    held = _attribute(graph, module, fossil)
    behind = graph.call_function(operator.getitem, (arguments, slice(1, None)))
    given = graph.call_function(operator.add, ((features,), behind))
    keywords = graph.call_method("copy", (keywords,))
    graph.call_method("pop", (keywords, first, None))
    block = _attribute(graph, held, BLOCK)
    _mix(graph, held, features, graph.call_method("__call__", (unpack, block, {}, given, keywords)))
    return functools.partial(fx.GraphModule(nn.Module(), graph, class_name="MixInBlock"), functional_call)


def _mix(graph: fx.Graph, held: fx.Node, features: fx.Node, returned: fx.Node) -> None:
    """Return ``returned`` and ``features``, mixed by the weight in ``held``."""
    typed = [graph.call_method("to", (one, features)) for one in (returned, _attribute(graph, held, ALPHA))]
    graph.output(graph.call_function(torch.lerp, (features, *typed)))


INPUT = (
    "what grew here reads the input of the whole network, which has not been called: call the network that finalize() "
    "returned and not its parts, or let another blueprint grow"
)
"""Key of the input, and what a KeyError says where it is not."""


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
    host.register_forward_pre_hook(_keep_input(submodule, attribute, place), with_kwargs=True)
    host.register_forward_hook(_forget_input(submodule, attribute), always_call=True)


def _keep_input(submodule: str, attribute: str, place: int | str) -> fx.GraphModule:
    graph = fx.Graph()
    module, arguments, keywords = (graph.placeholder(name) for name in ("module", "arguments", "keywords"))
    values = arguments if isinstance(place, int) else keywords
    kept = _get_kept(graph, module, submodule, attribute)
    graph.call_method("update", (kept, {INPUT: graph.call_function(operator.getitem, (values, place))}))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="KeepInput")


def _forget_input(submodule: str, attribute: str) -> fx.GraphModule:
    graph = fx.Graph()
    module, _, _ = (graph.placeholder(name) for name in ("module", "arguments", "output"))
    graph.call_method("clear", (_get_kept(graph, module, submodule, attribute),))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="ForgetInput")


def _get_kept(graph: fx.Graph, module: fx.Node, submodule: str, attribute: str) -> fx.Node:
    # By way of the submodule: compiled code would take a reference of the host's own for another dictionary.
    return graph.call_function(getattr, (graph.call_method("get_submodule", (module, submodule)), attribute))
