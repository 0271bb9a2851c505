"""Turn a growing model into an ordinary module: kept seeds are built in, others dropped, lossy saving is refused."""

import copy
import functools
import inspect
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from inspect import Parameter
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.func import functional_call

from esper.errors import ExportError, SlotError
from esper.growth.blueprints.registry import Context, Folded
from esper.growth.depth import CONFIGURATION, DepthTracker, deepen
from esper.growth.hooks import find_tensors, is_close, list_named_modules
from esper.growth.inputs import call_host, fit_example
from esper.growth.site import Site
from esper.growth.slot import Seed, side_pass
from esper.numerics.modules import copy_with, keep_modes

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

TOLERANCE = 1e-3
"""Largest difference of outputs, relative to the largest value; more for dtypes less precise than float32."""
TF32 = 2**-10
"""Rounding of factors in TF32, which accelerators may use in place of float32."""
_UNKNOWN = (
    "cannot be found out, since this model returns no tensors, or was pickled, which loses the example input: finalize "
    "the one that esper.attach or esper.load returned"
)


def build_plain_module(model: "GrowingModel", kept: list[str]) -> nn.Module:
    """A copy of the host with the seeds of the slots ``kept`` folded in."""
    grown = copy_with(model, model, ExportError)
    grown.release()
    host = grown.host
    shared: dict[int, list[str]] = defaultdict(list)
    for key, weight in host.named_parameters(remove_duplicate=False):
        shared[id(weight)].append(key)
    # Fold in the seeds. Inserted blocks change the names of the blocks after them, so updates of existing weights come
    # first, then wider layers, while all modules still have their original names.
    names = {name: name for name in kept}
    blocks: dict[str, nn.Module] = {}
    by_way: dict[Folded, list[str]] = {way: [] for way in Folded}
    turns = {Context.LAYER: 0, Context.HIDDEN: 1}
    for name in sorted(kept, key=lambda name: turns.get(grown.seeds[name].context, 2)):
        slot, seed = grown.slots[name], grown.seeds[name]
        way = seed.blueprint.fold(host, names[name], float(seed.alpha))
        by_way[way].append(name)
        for keys in shared.values() if way in (Folded.MERGED, Folded.WIDENED) else ():
            if len({id(host.get_parameter(key)) for key in keys}) > 1:
                raise ExportError(
                    f"{seed.blueprint.name!r} in slot {name!r} cannot change only one of {' and '.join(keys)}, which "
                    "share a weight: give each its own in model.host, and set its config.tie_word_embeddings to False "
                    "if it has that, or prune the seed"
                )
        if way is Folded.INSERTED:
            names = {other: _shift_path(path, names[name]) for other, path in names.items()}
        if way is Folded.NOT:
            add_fossil(host, names[name], seed, slot.site, name, grown.input_hook.place)
            block = seed.blueprint.find_block()
            if block is not None:
                blocks[name] = block
    # Count the new blocks in the host's configuration, and set the new widths.
    deepen(host, {names[name]: name for name in by_way[Folded.INSERTED]})
    DepthTracker(host).set_blocks({names[name]: block for name, block in blocks.items()})
    # Check the results, which depend on how the host's own code uses containers and weights.
    ways = {way: slots for way, slots in {**by_way, Folded.NOT: list(blocks)}.items() if slots}
    if ways:
        _require_equal(model, host, kept, ways)
    refuse_saving(host, [names[name] for way, slots in by_way.items() if way is not Folded.MERGED for name in slots])
    return host


def choose_kept(seeds: Mapping[str, Seed], unfinished: Literal["keep", "drop", "raise"]) -> list[str]:
    """The slots of all fossils, and of live seeds as ``unfinished`` decides."""
    kept: list[str] = []
    descriptions: list[str] = []
    for name, seed in seeds.items():
        alpha, contribution = float(seed.alpha), math.nan if seed.contribution is None else seed.contribution
        is_kept = seed.fossilized or (unfinished == "keep" and alpha > 0 and not contribution < 0)
        kept += [name] if is_kept else []
        if not seed.fossilized:
            outcome = "" if unfinished == "raise" else "kept " if is_kept else "dropped "
            measured = "not measured" if math.isnan(contribution) else f"{contribution:+.4f}"
            figures = f"alpha {alpha:.2f}, contribution {measured}"
            descriptions.append(f"{outcome}{seed.blueprint.name} in {name!r} ({figures})")
    if not descriptions or unfinished == "drop":
        return kept
    text = f"unfinished seeds: {'; '.join(descriptions)}; call finish() of their grower first to have them measured, or"
    if unfinished == "raise":
        raise SlotError(f"{text} fossilize or prune them, or use finalize(unfinished='keep') or 'drop'")
    warnings.warn(f"{text} finalize(unfinished='drop') to drop them all", stacklevel=4)
    return kept


def _shift_path(path: str, inserted: str) -> str:
    """The name of the submodule ``path`` after another module was inserted after ``inserted``."""
    start = inserted.removesuffix(inserted.rpartition(".")[2])
    first, dot, rest = path.removeprefix(start).partition(".")
    if not path.startswith(start) or not first.isdecimal() or int(first) <= int(inserted.removeprefix(start)):
        return path
    return f"{start}{int(first) + 1}{dot}{rest}"


_CAUSES = {
    Folded.INSERTED: "a block inserted behind {!r} is not run as the next one: the model does not go through its "
    "nn.ModuleList in turn",
    Folded.MERGED: "what was added to the weight of {!r} does not do what its seed did{}: something else reads that "
    "weight, too, or changes what the layer returns",
    Folded.WIDENED: "the units that were added to the layers of {!r} do not do what their seed did: something else "
    "reads the weights, too, or changes what the layers return",
    Folded.NOT: "a copy of the block {!r} does not do what its seed did",
}


def _require_equal(model: "GrowingModel", plain: nn.Module, kept: list[str], ways: Mapping[Folded, list[str]]) -> None:
    """Reject a ``plain`` model that does not compute the same outputs as the growing one.

    ``ways`` has the slots by how they were built in, for `Folded.NOT` only those with copies of blocks.
    """
    try:
        expected, computed = _compute_both(model, plain, kept)
    except RuntimeError as error:
        if Folded.WIDENED not in ways:
            raise
        raise ExportError(
            f"the host cannot be called with the units that grew behind {ways[Folded.WIDENED][0]!r} ({error}): its "
            "code, or what grew between their layers, depends on the original number of units; save the growing model "
            "with esper.save"
        ) from error
    altered = [*ways.get(Folded.MERGED, []), *ways.get(Folded.WIDENED, [])]
    if not expected and Folded.INSERTED in ways:
        raise ExportError(f"whether the model runs a block behind {ways[Folded.INSERTED][0]!r} {_UNKNOWN}")
    if not expected and altered:
        warnings.warn(f"whether the layer behind {altered[0]!r} alone reads its weight {_UNKNOWN}", stacklevel=5)
    equal, when = _are_close(plain, expected, computed), ""
    # A model may use some weights only in training. Inserted blocks and additional units draw other random numbers.
    if equal and ways.keys() <= {Folded.MERGED, Folded.NOT} and Folded.MERGED in ways:
        when = " in training mode"
        equal = _are_close(plain, *_compute_both(model, plain, kept, training_blocks=ways.get(Folded.NOT, [])))
    if not equal:
        causes = [cause.format(ways[way][0], when) for way, cause in _CAUSES.items() if way in ways]
        raise ExportError(f"{', or '.join(causes)}; save the growing model with esper.save")


def _compute_both(
    model: "GrowingModel", plain: nn.Module, kept: list[str], training_blocks: list[str] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of both models for the example input, with the same random numbers; empty if they cannot be compared.

    With ``training_blocks`` (slots whose seeds are blocks) these and the host are in training mode, but not torch's
    layers, so that nothing drops out and no batch is too small.
    """
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    if model.example.arguments is None:
        return outputs
    example = fit_example(model.host, model.example.arguments, model.slots.values()[0].like)
    with ExitStack() as stack:
        for network in (model, plain):
            stack.enter_context(keep_modes(network))
            network.eval()
        if training_blocks is not None:
            stack.enter_context(model.frozen.suspended())  # in the plain model nothing is frozen
            grown = [module for name in training_blocks for module in model.seeds[name].modules()]
            for module in (*model.host.modules(), *grown, *plain.modules()):
                module.training = not type(module).__module__.startswith("torch.nn.")
        for name, slot in model.slots.items():
            if name not in kept:
                stack.enter_context(slot.disabled())
        stack.enter_context(torch.no_grad())
        for network, tensors in zip((model, plain), outputs, strict=True):
            with side_pass(network):
                try:
                    returned = find_tensors(call_host(network, example))
                except Exception:
                    if training_blocks is not None and network is model:  # the example is none for training
                        return [], []
                    raise
                tensors += [part for part in returned if part.is_floating_point() and not part.is_nested]
    return outputs


def _are_close(network: nn.Module, expected: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether outputs of a network are equal up to rounding, also in the types of its parameters."""
    kinds = {tensor.dtype for tensor in (*network.parameters(), *expected) if tensor.is_floating_point()}
    rounding = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    if any(tensor.device.type != "cpu" for tensor in expected):
        rounding = max(rounding, TF32)
    tolerance = max(TOLERANCE, 8 * rounding)
    return len(expected) == len(outputs) and all(
        is_close(theirs, ours, tolerance) for ours, theirs in zip(expected, outputs, strict=True)
    )


# What `save_pretrained` would lose ------------------------------------------------------------------------------------

SAVING_METHODS = ("save_pretrained", "push_to_hub")
"""Methods of Hugging Face models that save the class's own parameters and a configuration."""
_LOST = (
    "from_pretrained would lose what grew here, because the configuration does not describe it: save the growing model "
    "by esper.save, or torch.save(plain.state_dict(), file) of what finalize() returned"
)


def refuse_while_growing(host: nn.Module, slots: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Make the methods that save parts of a host with slots raise an ExportError; returns parts and methods."""
    refused = [(part, method) for part, method in _list_methods(host, slots) if method not in vars(part)]
    for part, method in refused:
        vars(part)[method] = _raise_lost
    return refused


def _raise_lost(*_: Any, **__: Any) -> NoReturn:
    raise ExportError(_LOST)


def refuse_saving(plain: nn.Module, changed: Iterable[str]) -> None:
    """Make saving raise a KeyError with a sentence in parts around ``changed`` submodules that are not built alike."""
    for part, method in _list_methods(plain, changed):
        if not is_built_alike(part):
            vars(part)[method] = fx.symbolic_trace(lambda *_, **keywords: keywords[_LOST])


def _list_methods(host: nn.Module, names: Iterable[str]) -> Iterator[tuple[nn.Module, str]]:
    """Parts of the host around one of the submodules, with each of their methods that saves them."""
    inner = [f"{name}." for name in names]
    for name, part in list_named_modules(host):
        if any(path.startswith(name and f"{name}.") for path in inner):
            for method in SAVING_METHODS:
                if callable(getattr(type(part), method, None)):
                    yield part, method


def is_built_alike(model: nn.Module) -> bool:
    """Whether ``type(model)(model.config)`` has tensors of equal names and shapes, and equal indices of blocks."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = type(model)(copy.deepcopy(vars(model)[CONFIGURATION]))
    except (*TRACING_ERRORS, NotImplementedError):
        return False
    shapes, built_shapes = (
        {name: value.shape for name, value in module.state_dict().items()} for module in (model, built)
    )
    return shapes == built_shapes and _list_block_attributes(model) == _list_block_attributes(built)


def _list_block_attributes(model: nn.Module) -> dict[str, list[Any]]:
    """Plain attributes that differ between modules whose names differ only by numbers, by name."""
    values: dict[str, list[Any]] = defaultdict(list)
    for path, module in list_named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and name != "training":
                values[re.sub(r"\b\d+\b", "*", f"{path}.{name}")].append(value)
    return {name: group for name, group in values.items() if any(value != group[0] for value in group)}


# Fossils: seeds as hooks of a plain host, made of torch operations only, so that it does not need Esper ---------------

PREFIX = "fossil_"
"""Prefix of the names of fossils in the submodules that they follow."""
TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
INPUT = (
    "what grew here reads the input of the whole network, which has not been called: call the network that finalize() "
    "returned and not its parts, or let another blueprint grow"
)
"""Key of the network's input, and so the message of the KeyError if it is missing."""
_CHILD_ACCESS = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
"""Names used by modules that run all their children."""


class _Traced(nn.Module):
    """A seed for `torch.export`, called with features, and perhaps the network's input."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, *arguments: Tensor) -> Tensor:
        # A view that fails for lengths for which the graph was not made; broadcasting would accept some of them.
        return self.seed(arguments[0].reshape(arguments[0].shape), arguments[-1])


def trace_seed(seed: Seed, site: Site, slot: str) -> ExportedProgram:
    """Trace a seed in evaluation mode, for any batch size, and for other lengths if possible."""
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
    If the submodule runs all its children in its own way, they are its attributes. ``place`` is that of the network's
    input.
    """
    followed, block = host.get_submodule(path), seed.blueprint.find_block()
    if block is not None and (runs_children(followed) or float(seed.alpha) != 1):
        what = f"{seed.blueprint.name!r} in slot {slot!r} counts with {float(seed.alpha):.2f}"
        if runs_children(followed):
            raise ExportError(
                f"{what} behind a module that runs all its children, where a plain model can only have it with a "
                "weight of 1 in a list of blocks; save the growing model with esper.save"
            )
        warnings.warn(
            f"{what}: it runs behind its block, and save_pretrained is refused; with a weight of 1 it would be the "
            "next one in a list of blocks",
            stacklevel=5,
        )
    # In evaluation mode, torch's encoder turns padded examples into nested tensors, which a graph cannot take. Make it
    # keep the padding, as in training; its values there are then arbitrary instead of zero.
    for name, module in list_named_modules(host):
        if isinstance(module, nn.TransformerEncoder) and path.startswith(f"{name}." if name else ""):
            module.enable_nested_tensor = module.use_nested_tensor = False
    child = _find_unused_name(followed, PREFIX + seed.blueprint.name)
    runner, owner, prefix = followed, followed, f"{child}_"
    if not runs_children(followed):
        path, owner, prefix = f"{path}.{child}", nn.Identity().train(followed.training), ""
        followed.add_module(child, owner)
        runner = owner if type(followed).forward is nn.Sequential.forward else followed
    names: list[str | None] = []
    """Attributes with the tensors of the seed's graph, in the order of its placeholders; None for inputs."""
    if block is None:
        program = trace_seed(seed, site, slot)
        traced, state = program.graph, cast("dict[str, Any]", {**program.constants, **program.state_dict})
        for target in (spec.target for spec in program.graph_signature.input_specs):
            names.append(None)
            if target is not None:
                short = target.removeprefix("seed.").removeprefix("blueprint.").replace(".", "_")
                names[-1], tensor = _find_unused_name(owner, prefix + short), state[target]
                register = owner.register_parameter if isinstance(tensor, nn.Parameter) else owner.register_buffer
                register(names[-1], tensor)
        for node in list(traced.nodes):  # assertions name the traced dtype and device
            if not node.users and "assert" in node.name:
                traced.erase_node(node)
    else:
        traced = fx.Graph()
        owner.add_module("block", block)
        owner.register_buffer("alpha", seed.alpha)
    kept = _find_unused_name(owner, f"{prefix}inputs")
    if seed.context is Context.NETWORK:
        _relay_input(host, path, kept, place)
    parameters = list(inspect.signature(followed.forward).parameters.values())
    in_tuple = site.layer is not None and site.layer.in_tuple

    def follow(unpack: Any, module: Any, arguments: Any, keywords: Any, output: Any) -> Any:
        holder = module if owner is runner else getattr(module, child)
        features = output[0] if in_tuple else output
        if block is not None:
            if [parameter.kind for parameter in parameters] == [Parameter.POSITIONAL_OR_KEYWORD]:
                computed = holder.block(features)
            else:  # the features take the place of the block's first argument, positional or not
                named = keywords.copy()
                named.pop(parameters[0].name if parameters else "", None)
                computed = unpack(holder.block, {}, (features,) + arguments[1:], named)  # noqa: RUF005
            changed = torch.lerp(features, computed.to(features), holder.alpha.to(features))
        else:
            inputs: list[Any] = [features]
            if seed.context is Context.NETWORK:
                inputs.append(getattr(holder, kept)[INPUT])
            graph = features.tracer.graph
            values = [
                inputs.pop(0).node if name is None else graph.call_function(getattr, (holder.node, name))
                for name in names
            ]
            copies = dict(zip(traced.find_nodes(op="placeholder"), values, strict=True))
            (result,) = graph.graph_copy(traced, copies)
            changed = fx.Proxy(result, features.tracer)
            # In each call, the features' device and dtype replace those of the traced tensors.
            places = {seed.alpha.device: "device", seed.alpha.dtype: "dtype"}
            for node in list(graph.nodes):
                for index, value in (*enumerate(node.args), *node.kwargs.items()):
                    if isinstance(value, torch.device | torch.dtype) and value in places:
                        with graph.inserting_before(node):
                            own = graph.call_function(getattr, (features.node, places[value]))
                        update = node.update_arg if isinstance(index, int) else node.update_kwarg
                        update(index, own)
        return (changed,) + output[1:] if in_tuple else changed  # noqa: RUF005

    # A trace cannot unpack arguments; `functional_call` does, uncompiled. As a constant, unpickling would call it.
    runner.register_forward_hook(functools.partial(fx.symbolic_trace(follow), functional_call), with_kwargs=True)


def _relay_input(host: nn.Module, path: str, attribute: str, place: int | str) -> None:
    """Keep the host's input in a dictionary of the submodule ``path``, under the key `INPUT`, only during a pass."""
    setattr(host.get_submodule(path), attribute, dict[str, object]())

    # Each hook gets the dictionary from the submodule, as compiled code would treat a reference to it as another one.
    def keep_input(module: Any, arguments: Any, keywords: Any) -> None:
        value = arguments[place] if isinstance(place, int) else keywords[place]
        getattr(module.get_submodule(path), attribute).update({INPUT: value})

    def forget_input(module: Any, arguments: Any, output: Any) -> None:  # noqa: ARG001 (a hook gets them)
        getattr(module.get_submodule(path), attribute).clear()

    host.register_forward_pre_hook(fx.symbolic_trace(keep_input), with_kwargs=True)
    host.register_forward_hook(fx.symbolic_trace(forget_input), always_call=True)


def _find_unused_name(module: nn.Module, name: str) -> str:
    """``name`` with enough underscores to be unused: the module may have fossils of an earlier growth."""
    return name if not hasattr(module, name) else _find_unused_name(module, f"{name}_")


def runs_children(module: nn.Module) -> bool:
    """Whether a module may run all its children in its own way, so that another one would change its output."""
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
