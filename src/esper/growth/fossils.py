"""Fossils: seeds as graphs of only torch operations, and the hooks that run them in a plain host."""

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
from torch.testing import assert_close

from esper.errors import ExportError
from esper.growth.blueprints.registry import Context, LayerCall
from esper.growth.seed import Seed
from esper.growth.site import CHANNELS_LAST, Site
from esper.numerics.module_state import keep_modes

TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Errors that `torch.export` raises for modules that it cannot trace."""


@dataclass(frozen=True)
class FormerWidth:
    """The number of features along an axis before layers became wider."""

    axis: int
    width: int

    def select(self, part: slice) -> tuple[slice, ...]:
        """An index that selects a part of the features."""
        return (*[slice(None)] * self.axis, part)


@dataclass(frozen=True)
class TracedFossil:
    """A traced seed: a graph of torch operations and its tensors."""

    program: ExportedProgram
    tensors: dict[str, Tensor]
    """Parameters, buffers and constants of the graph."""
    reads_inputs: bool
    """Whether the graph needs the network's input."""

    def make_hook(
        self,
        names: Mapping[str, str],
        inputs: str | None,
        *,
        in_tuple: bool = False,
        former: FormerWidth | None = None,
    ) -> fx.GraphModule:
        """A forward hook of a module that has the tensors as attributes.

        Args:
            names: Names of the attributes, by the names in `tensors`.
            inputs: Name of the attribute in which `relay_input` keeps the network's input; None: it is not needed.
            in_tuple: Whether the module returns a tuple whose first element is the features.
            former: Width for which the seed was made, if the features are wider now; the first features are used.
        """
        graph = fx.Graph()
        module, _, output = (graph.placeholder(name) for name in ("module", "arguments", "features"))
        features = all_features = take_features(graph, output, in_tuple=in_tuple)
        if former is not None:
            features = graph.call_function(operator.getitem, (all_features, former.select(slice(former.width))))
        inputs_of_seed = [features]
        if inputs is not None:
            inputs_of_seed.append(graph.call_function(operator.getitem, (_attribute(graph, module, inputs), INPUT)))
        remaining_inputs = iter(inputs_of_seed)
        # In each call, the features' device and dtype replace those of the traced tensors.
        alpha = self.tensors["alpha"]
        placement = {alpha.device: "device", alpha.dtype: "dtype"}

        def replace_placement(argument: Any) -> Any:
            if isinstance(argument, torch.device | torch.dtype) and argument in placement:
                return _attribute(graph, features, placement[argument])
            return argument

        # Copy the graph node by node. Inputs with a target are tensors of the seed.
        copies: dict[fx.Node, fx.Node] = {}
        targets = {spec.arg.name: spec.target for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                target = targets[node.name]
                if target is None:
                    copies[node] = next(remaining_inputs)
                else:
                    copies[node] = _attribute(graph, module, names[target.removeprefix(_TRACED_PREFIX)])
            elif node.op == "output":
                changed = copies[node.args[0][0]]
                if former is not None:
                    select_rest = former.select(slice(former.width, None))
                    rest = graph.call_function(operator.getitem, (all_features, select_rest))
                    changed = graph.call_function(torch.cat, ((changed, rest), former.axis))
                graph.output(put_features(graph, output, changed, in_tuple=in_tuple))
            elif not is_assertion(node):
                copied = copies[node] = graph.node_copy(node, copies.__getitem__)
                with graph.inserting_before(copied):
                    copied.args = tuple(map(replace_placement, copied.args))
                    copied.kwargs = {name: replace_placement(argument) for name, argument in copied.kwargs.items()}
        return fx.GraphModule(self.program.graph_module, graph, class_name="Fossil")


def trace_seed(seed: Seed, site: Site, slot: str) -> TracedFossil:
    """Trace a seed at its site, in evaluation mode, for any batch size, and for other lengths if possible.

    Raises:
        ExportError: `torch.export` cannot trace the blueprint.
    """
    kind = type(seed.blueprint)
    reads_inputs = kind.context is Context.NETWORK
    shapes = [site.shape, site.input_shape] if reads_inputs else [site.shape]
    # The batch size differs from all other axes, so that torch does not treat them as the same symbol.
    batch = next(size for size in range(2, 16) if all(size not in shape for shape in shapes))
    example = tuple(seed.alpha.new_zeros(batch, *shape) for shape in shapes)
    axes: list[dict[int, Any]] = []
    for shape in shapes:
        channel_axis = len(shape) if site.layout in CHANNELS_LAST else 1
        lengths = [axis for axis in range(1, len(shape) + 1) if axis != channel_axis]
        axes.append({0: Dim.DYNAMIC, **dict.fromkeys(lengths, Dim.AUTO)})
    # Lengths are dynamic where the blueprint's code allows it.
    try:
        with keep_modes(seed):
            program = export(_Traced(seed).eval(), example, dynamic_shapes=(tuple(axes),))
    except TRACING_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"torch.export cannot trace blueprint {kind.name!r}, which grew in slot {slot!r} ({reason}): "
            "write its forward without Python branches on sizes or values, or save the growing model by esper.save"
        ) from error
    # All tensors of the graph, by their names in the seed.
    state: dict[str, Any] = {**program.constants, **program.state_dict}
    targets = [spec.target for spec in program.graph_signature.input_specs if spec.target is not None]
    tensors = {target.removeprefix(_TRACED_PREFIX): state[target] for target in targets}
    return TracedFossil(program, tensors, reads_inputs)


_TRACED_PREFIX = "seed."
"""Prefix of the names of a seed's tensors in `_Traced`."""


class _Traced(nn.Module):
    """A seed for `torch.export`, called with features, and with the network's input if the seed needs it."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, *arguments: Tensor) -> Tensor:
        features, inputs = arguments[0], arguments[-1]
        # A view that fails for lengths for which the graph was not made; broadcasting would accept some of them.
        features = features.reshape(features.shape)
        call = LayerCall((features,), {}) if self.seed.context is Context.CALL else inputs
        return self.seed(features, call)


def _attribute(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    return graph.call_function(getattr, (node, name))


def take_features(graph: fx.Graph, output: fx.Node, *, in_tuple: bool) -> fx.Node:
    """The features in a module's output: the whole output, or the first element of a tuple."""
    return graph.call_function(operator.getitem, (output, 0)) if in_tuple else output


def put_features(graph: fx.Graph, output: fx.Node, features: fx.Node, *, in_tuple: bool) -> fx.Node:
    """A module's output with its features replaced."""
    if not in_tuple:
        return features
    rest = graph.call_function(operator.getitem, (output, slice(1, None)))
    return graph.call_function(operator.add, ((features,), rest))


def is_assertion(node: fx.Node) -> bool:
    """Whether the node only asserts that a tensor has the traced dtype and device."""
    return not node.users and "assert" in node.name


BLOCK, ALPHA = "block", "alpha"
"""Attributes of a fossil with a block: the block, and its weight."""


def make_mixer() -> fx.GraphModule:
    """A forward hook of a fossil with a block, which returns ``(1 - alpha) * h + alpha * block(h)`` for its output h.

    Unlike the hook of `make_block_mixer` it compiles as one graph.
    """
    graph = fx.Graph()
    module, _, features = (graph.placeholder(name) for name in ("module", "arguments", "features"))
    _mix(graph, module, features, graph.call_method(BLOCK, (module, features)))
    return fx.GraphModule(nn.Module(), graph, class_name="MixAlone")


def make_block_mixer(fossil: str, first: str) -> functools.partial[Tensor]:
    """A forward hook, with keywords, of a block that has a copy of itself in its submodule ``fossil``.

    It returns ``(1 - alpha) * h + alpha * copy(h, ...)`` for the block's output h. The copy gets all other arguments of
    the block; ``first`` is the name of the first argument.
    """
    graph = fx.Graph()
    # A graph cannot unpack arguments, but `functional_call` can. It is an argument, or unpickling would call it.
    names = ("unpack", "module", "arguments", "keywords", "features")
    unpack, module, arguments, keywords, features = map(graph.placeholder, names)
    owner = _attribute(graph, module, fossil)
    rest = graph.call_function(operator.getitem, (arguments, slice(1, None)))
    positional = graph.call_function(operator.add, ((features,), rest))
    # The block's output takes the place of its first argument, positional or not.
    keywords = graph.call_method("copy", (keywords,))
    graph.call_method("pop", (keywords, first, None))
    block = _attribute(graph, owner, BLOCK)
    _mix(graph, owner, features, graph.call_method("__call__", (unpack, block, {}, positional, keywords)))
    return functools.partial(fx.GraphModule(nn.Module(), graph, class_name="MixInBlock"), functional_call)


def _mix(graph: fx.Graph, owner: fx.Node, features: fx.Node, output: fx.Node) -> None:
    """End the graph by mixing ``output`` and ``features`` with the weight in ``owner``."""
    typed = [graph.call_method("to", (node, features)) for node in (output, _attribute(graph, owner, ALPHA))]
    graph.output(graph.call_function(torch.lerp, (features, *typed)))


_PREPARE_SCRIPT = "__prepare_scriptable__"
"""The method of a module that `torch.jit.script` calls first."""
_UNSCRIPTABLE = "torch.jit.script cannot compile what grew in this model: use torch.jit.trace or torch.export.export"


def refuse_scripting(fossil: nn.Module) -> None:
    """Make `torch.jit.script` of ``fossil``, or of a model that contains it, raise an AssertionError with a sentence.

    This does not need Esper: it consists of torch objects only, and is copied and pickled with the module.
    """
    # The function is an argument, because an unpickled graph runs once without values to record its calls.
    graph = fx.Graph()
    expect = graph.placeholder("expect")
    graph.output(graph.call_method("__call__", (expect, True, False), {"msg": _UNSCRIPTABLE}))
    refusal = fx.GraphModule(nn.Module(), graph, class_name="RefuseScripting")
    vars(fossil)[_PREPARE_SCRIPT] = functools.partial(refusal, assert_close)


INPUT = (
    "what grew here reads the input of the whole network, which has not been called: call the network that finalize() "
    "returned and not its parts, or let another blueprint grow"
)
"""Key of the input, and so the message of the KeyError if it is missing."""


def relay_input(host: nn.Module, submodule: str, attribute: str, place: int | str) -> None:
    """Keep the host's input in a dictionary of ``submodule`` while the host runs, under the key `INPUT`.

    The hooks are `fx.GraphModule`s, so they can be copied, pickled, compiled and exported with the host. After the pass
    the dictionary is empty, so that copies and files of the host contain no data. Therefore `torch.utils.checkpoint`
    must not recompute the submodule later.

    Args:
        host: The host, which gets two hooks.
        submodule: Name of the submodule in the host.
        attribute: Name of the dictionary in the submodule.
        place: Index or keyword of the input among the host's arguments.
    """
    setattr(host.get_submodule(submodule), attribute, dict[str, object]())
    # Before the pass: keep the input.
    graph = fx.Graph()
    module, arguments, keywords = (graph.placeholder(name) for name in ("module", "arguments", "keywords"))
    values = arguments if isinstance(place, int) else keywords
    kept = _find_dictionary(graph, module, submodule, attribute)
    graph.call_method("update", (kept, {INPUT: graph.call_function(operator.getitem, (values, place))}))
    graph.output(None)
    keep = fx.GraphModule(nn.Module(), graph, class_name="KeepInput")
    host.register_forward_pre_hook(keep, with_kwargs=True)
    # After the pass, or an error: empty the dictionary.
    graph = fx.Graph()
    module, _, _ = (graph.placeholder(name) for name in ("module", "arguments", "output"))
    graph.call_method("clear", (_find_dictionary(graph, module, submodule, attribute),))
    graph.output(None)
    forget = fx.GraphModule(nn.Module(), graph, class_name="ForgetInput")
    host.register_forward_hook(forget, always_call=True)


def _find_dictionary(graph: fx.Graph, module: fx.Node, submodule: str, attribute: str) -> fx.Node:
    # Accessed through the submodule, because compiled code would treat a reference in the host as another dictionary.
    return graph.call_function(getattr, (graph.call_method("get_submodule", (module, submodule)), attribute))
