"""Turn a growing model into an ordinary module: kept seeds are built in, all others dropped."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from inspect import Parameter
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from esper.errors import ExportError, SlotError
from esper.growth.blueprints.registry import Context, Folded
from esper.growth.copies import copy_module
from esper.growth.depth import DepthTracker, deepen
from esper.growth.fossils import (
    ALPHA,
    BLOCK,
    FormerWidth,
    make_block_mixer,
    make_mixer,
    put_features,
    refuse_scripting,
    relay_input,
    take_features,
    trace_seed,
)
from esper.growth.hooks import require_attached
from esper.growth.positions import list_argument_names
from esper.growth.pretrained import refuse_saving
from esper.growth.probe import Arguments, call_host, fit_example
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.growth.slot import Slot
from esper.growth.taps import find_features, find_tensors, list_named_modules
from esper.growth.tying import TiedWeights
from esper.growth.widening import widen_configurations
from esper.lifecycle.rules import Isolation
from esper.numerics.module_state import keep_modes

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Prefix of the names of fossils in the submodules that they follow."""
TOLERANCE = 1e-3
"""Largest difference of outputs, relative to the largest value; more for dtypes less precise than float32."""
TF32 = 2**-10
"""Rounding of factors in TF32, which accelerators may use in place of float32."""
_UNKNOWN = (
    "cannot be found out where a model returns no tensors, or was pickled, which loses the example input: finalize the "
    "one that esper.attach or esper.load returned"
)
_CHILD_ACCESS = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
"""Names used by modules that run all their children."""


class Unfinished(StrEnum):
    """What to do with live seeds."""

    KEEP = "keep"
    """Build in live seeds that affect the output and were not measured as harmful; drop the others; warn about both."""
    DROP = "drop"
    """Drop all live seeds. The host may then perform much worse, because it has trained with them."""
    RAISE = "raise"
    """Raise an error for a model with live seeds."""


def finalize(model: GrowingModel, unfinished: Unfinished) -> nn.Module:
    """A copy of the host with its seeds folded in; see `GrowingModel.finalize`.

    Raises:
        ExportError: `torch.export` cannot trace a seed's blueprint, or the host cannot be copied.
        SlotError: there are unfinished seeds, which ``unfinished`` forbids; or a slot is no longer called.
    """
    require_attached(model)
    kept = _choose_kept(model, unfinished)
    grown = copy_module(model, ExportError)
    grown.release()
    host = grown.host
    # Fold in the seeds, slot by slot. Inserted blocks change the names of the blocks after them.
    tied = TiedWeights(host)
    names = {name: name for name in kept}
    blocks: dict[str, nn.Module] = {}
    by_way: dict[Folded, list[str]] = {way: [] for way in Folded}
    # First updates of existing weights, then wider layers, while all modules still have their original names.
    turns = {Context.LAYER: 0, Context.HIDDEN: 1}
    former: dict[str, FormerWidth] | None = None
    for name in sorted(kept, key=lambda name: turns.get(grown.seeds[name].context, 2)):
        slot, seed = grown.slots[name], grown.seeds[name]
        if former is None and seed.context not in turns:
            widening = bool(by_way[Folded.WIDENED])
            former = _find_former_widths(model, host, [grown.slots[other] for other in kept]) if widening else {}
        way = seed.blueprint.fold(host, names[name], float(seed.alpha))
        by_way[way].append(name)
        if way is Folded.INSERTED:
            names = {other: _shift_path(path, names[name]) for other, path in names.items()}
        if way is Folded.NOT:
            block = _add_fossil(host, names[name], slot, seed, grown.tap.place, (former or {}).get(name))
            if block is not None:
                blocks[name] = block
    # Count the new blocks in the host's configuration.
    inserted, merged = by_way[Folded.INSERTED], by_way[Folded.MERGED]
    if inserted:
        deepen(host, {names[name]: name for name in inserted})
    depth = DepthTracker(host)
    for name, block in blocks.items():
        depth.set_block(names[name], block)
    losing = tied.untie()
    # Set the new widths in configurations.
    widened = by_way[Folded.WIDENED]
    hidden = {names[name]: grown.slots[name].site.hidden for name in widened}
    widen_configurations(host, {name: part for name, part in hidden.items() if part is not None})
    # Check the results, which depend on how the host's own code uses containers and weights.
    if inserted or merged or widened or blocks:
        _require_equal(model, host, kept=kept, inserted=inserted, merged=merged, widened=widened, blocks=list(blocks))
    refuse_saving(
        host,
        [names[name] for name in by_way[Folded.NOT]],
        inserted=[names[name] for name in inserted],
        widened=[names[name] for name in widened],
        losing=losing,
    )
    return host


def _choose_kept(model: GrowingModel, unfinished: Unfinished) -> list[str]:
    """The slots whose seeds become part of the plain model: all fossils, and live seeds as ``unfinished`` decides."""
    live = {name: seed for name, seed in model.seeds.items() if not seed.fossilized}
    descriptions: dict[str, str] = {}
    for name, seed in live.items():
        measured = seed.contribution is not None and not math.isnan(seed.contribution)
        contribution = f"contribution {seed.contribution:+.4f}" if measured else "contribution not measured"
        descriptions[name] = f"{seed.blueprint.name} in {name!r} (alpha {float(seed.alpha):.2f}, {contribution})"
    kept: list[str] = []
    if live and unfinished is Unfinished.RAISE:
        raise SlotError(
            f"unfinished seeds: {'; '.join(descriptions.values())}; call finish() of the grower, fossilize or prune "
            "them, or use finalize(unfinished='keep') or 'drop'"
        )
    if live and unfinished is Unfinished.KEEP:
        for name, seed in live.items():
            takes_part = seed.isolation is Isolation.NONE and float(seed.alpha) > 0
            does_harm = seed.contribution is not None and seed.contribution < 0
            if takes_part and not does_harm:
                kept.append(name)
        lines = (f"{'kept' if name in kept else 'dropped'} {text}" for name, text in descriptions.items())
        warnings.warn(
            f"unfinished seeds: {'; '.join(lines)}; call finish() of their grower first to have them measured and "
            "judged, or finalize(unfinished='drop') to drop them all",
            stacklevel=5,
        )
    return [name for name, seed in model.seeds.items() if seed.fossilized or name in kept]


def _shift_path(path: str, inserted: str) -> str:
    """The name of the submodule ``path`` after another module was inserted after ``inserted``."""
    # Siblings after the inserted module, with everything in them, move by one.
    parent, _, place = inserted.rpartition(".")
    suffix = path.removeprefix(f"{parent}." if parent else "")
    if suffix == path and parent:
        return path
    first, dot, rest = suffix.partition(".")
    if not first.isdecimal() or int(first) <= int(place):
        return path
    return ".".join(part for part in (parent, str(int(first) + 1)) if part) + dot + rest


def _find_former_widths(model: GrowingModel, host: nn.Module, slots: Sequence[Slot]) -> dict[str, FormerWidth]:
    """The former widths of features at ``slots`` where layers of a plain ``host`` became wider."""
    if model.example.arguments is None:
        raise ExportError(f"which features became more {_UNKNOWN}")
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, _: nn.Module, __: Any, output: Any) -> None:
        shapes[name] = tuple(find_features(output).shape[1:])

    handles = [
        host.get_submodule(slot.name).register_forward_hook(functools.partial(record, slot.name)) for slot in slots
    ]
    try:
        with keep_modes(host), torch.no_grad(), side_pass(host, ()):
            _call_wider(host, fit_example(host, model.example.arguments, slots[0].anchor), slots[0].name)
    finally:
        for handle in handles:
            handle.remove()
    return {
        slot.name: FormerWidth(1 + axis, before)
        for slot in slots
        for axis, (before, now) in enumerate(zip(slot.site.shape, shapes[slot.name], strict=True))
        if now > before
    }


def _call_wider(host: nn.Module, example: Arguments, slot: str) -> Any:
    """Call a host, some of whose layers became wider.

    Raises:
        ExportError: its code depends on their former widths.
    """
    try:
        return call_host(host.eval(), example)
    except RuntimeError as error:
        raise ExportError(
            f"the host cannot be called with the units that grew behind {slot!r} ({error}): its code depends on the "
            "original number of units; save the growing model with esper.save"
        ) from error


def _add_fossil(
    host: nn.Module, path: str, slot: Slot, seed: Seed, place: int | str, former: FormerWidth | None
) -> nn.Module | None:
    """Run a seed after the host's submodule ``path``: a copy of a block as a module, any other seed as a graph.

    A graph cannot take more arguments than features, apply dropout or update statistics, as a block may. If the
    submodule runs all its children, a block cannot be added.

    Args:
        host: A copy of the model's host, without slots.
        path: Name of the submodule.
        slot: Slot of the seed.
        seed: A live or fossilized seed.
        place: Index or keyword of the network's input among the host's arguments.
        former: Width of the features for which the seed was made, if the features are wider now.

    Returns:
        The block, if it runs as a module.
    """
    followed, block, layer = host.get_submodule(path), seed.blueprint.find_block(), slot.site.layer
    runs_children = _runs_children(followed)
    alpha, what = float(seed.alpha), f"{seed.blueprint.name!r} in slot {slot.name!r}"
    needs_call = seed.context is Context.CALL and layer is not None and not layer.single_argument
    if needs_call and (block is None or runs_children):
        raise ExportError(
            f"{what} has weight {alpha:.2f} in a module that runs all its children, but only with a weight of 1 it can "
            "be part of a plain model; save the growing model with esper.save"
        )
    if block is not None and former is not None:
        raise ExportError(
            f"{what} is a copy of a layer behind which units were added: a plain model can have only one of the two; "
            "save the growing model with esper.save"
        )
    if block is not None and (alpha != 1 or runs_children):
        how = ", as a graph, which neither drops out nor gathers statistics in training" if runs_children else ""
        warnings.warn(
            f"{what} counts with {alpha:.2f}: it runs behind its block{how}; in a list of blocks it would be the next "
            "one with a weight of 1; save_pretrained is refused",
            stacklevel=5,
        )
    # In evaluation mode, torch's encoder turns padded examples into nested tensors, which a graph cannot take. Make it
    # keep the padding, as in training; its values there are then arbitrary instead of zero.
    for name, module in list_named_modules(host):
        if isinstance(module, nn.TransformerEncoder) and path.startswith(f"{name}." if name else ""):
            module.enable_nested_tensor = module.use_nested_tensor = False
    if block is not None and not runs_children:
        _add_block(followed, PREFIX + seed.blueprint.name, block, seed.alpha)
        return block
    # A graph, whose tensors are in a separate submodule, or in the submodule itself if that runs all its children.
    kind, traced = seed.blueprint.name, trace_seed(seed, slot.site, slot.name)
    in_tuple = layer is not None and layer.in_tuple
    if runs_children:
        owner, prefix = followed, f"{_find_unused_name(followed, PREFIX + kind)}_"
    else:
        # An identity, and its hook computes the fossil's output from its own.
        owner, prefix = nn.Identity(), ""
        count = sum(tensor.numel() for tensor in traced.tensors.values() if isinstance(tensor, nn.Parameter))
        vars(owner)["extra_repr"] = functools.partial(str, f"what grew: {kind}, {count} parameters")
        path = f"{path}.{_add_child(followed, PREFIX + kind, owner, in_tuple=in_tuple)}"
    inputs = None
    if traced.reads_inputs:
        inputs = _find_unused_name(owner, f"{prefix}inputs")
        relay_input(host, path, inputs, place)
    attributes: dict[str, str] = {}
    for name, tensor in traced.tensors.items():
        attributes[name] = _find_unused_name(owner, prefix + name.removeprefix("blueprint.").replace(".", "_"))
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attributes[name], tensor)
        else:
            owner.register_buffer(attributes[name], tensor)
    # An identity within a module is called with only the features.
    owner.register_forward_hook(
        traced.make_hook(attributes, inputs, in_tuple=in_tuple and owner is followed, former=former)
    )
    refuse_scripting(owner)
    return None


def _runs_children(module: nn.Module) -> bool:
    """Whether a module may run all its children in its own way, so that another child would change its output.

    This is possible if it is a container with a forward pass, or if a method of its class accesses its children.
    Torch's own layers do so only to check for hooks.
    """
    if type(module).forward is nn.Sequential.forward:
        return False
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return True
    # Names in the code of all methods that are not torch's own.
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    foreign = (kind for kind in kinds if not kind.__module__.startswith("torch.nn."))
    methods = (method for kind in foreign for method in vars(kind).values() if inspect.isfunction(method))
    return any(not _CHILD_ACCESS.isdisjoint(_collect_names(method.__code__)) for method in methods)


def _collect_names(code: CodeType) -> set[str]:
    """Names of attributes and globals in a function and its nested functions."""
    return set(code.co_names).union(*(_collect_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _add_block(followed: nn.Module, name: str, block: nn.Module, alpha: Tensor) -> None:
    """Run a copy of a block after the block ``followed``, with the same arguments, and mix both outputs."""
    fossil = nn.Identity()
    fossil.add_module(BLOCK, block)
    fossil.register_buffer(ALPHA, alpha)
    refuse_scripting(fossil)
    try:
        parameters = list(inspect.signature(followed.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    if len(parameters) == 1 and parameters[0].kind not in variadic:  # with any input there are features only
        _add_child(followed, name, fossil)
        fossil.register_forward_hook(make_mixer())
    else:
        child = _add_child(followed, name, fossil, calls=False)
        first = next(iter(list_argument_names(followed)), "")
        followed.register_forward_hook(make_block_mixer(child, first), with_kwargs=True)


def _add_child(followed: nn.Module, name: str, fossil: nn.Module, *, calls: bool = True, in_tuple: bool = False) -> str:
    """Add a fossil to ``followed``; returns its name, with underscores if the name is taken.

    With ``calls``, ``followed`` calls the fossil with its features, which are its output or, with ``in_tuple``, the
    first element of its output.
    """
    name, fossil.training = _find_unused_name(followed, name), followed.training
    followed.add_module(name, fossil)
    if calls and type(followed).forward is not nn.Sequential.forward:  # which runs all children by itself
        graph = fx.Graph()
        module, _, output = (graph.placeholder(name) for name in ("module", "arguments", "features"))
        features = take_features(graph, output, in_tuple=in_tuple)
        features = graph.call_method(name, (module, features))
        graph.output(put_features(graph, output, features, in_tuple=in_tuple))
        followed.register_forward_hook(fx.GraphModule(nn.Module(), graph, class_name="RunFossil"))
    return name


def _find_unused_name(module: nn.Module, name: str) -> str:
    """``name`` with enough underscores to be unused: the module may have fossils of an earlier growth."""
    attributes = set(dir(module))
    while name in attributes:
        name += "_"
    return name


def _require_equal(
    model: GrowingModel,
    plain: nn.Module,
    *,
    kept: list[str],
    inserted: list[str],
    merged: list[str],
    widened: list[str],
    blocks: list[str],
) -> None:
    """Reject a ``plain`` model that does not compute the same outputs as the growing one.

    There are several possible causes: the owner of a container does not run a block that was ``inserted`` there,
    something else uses a weight into which a seed was ``merged``, code depends on the width of ``widened`` layers, or
    ``blocks`` are called in another way.
    """
    if widened and model.example.arguments is not None:
        with keep_modes(plain), torch.no_grad(), side_pass(plain, ()):
            _call_wider(plain, fit_example(plain, model.example.arguments, model.slots[widened[0]].anchor), widened[0])
    expected, computed = _compute_both(model, plain, kept)
    if not expected and inserted:
        raise ExportError(f"whether the model runs a block behind {inserted[0]!r} {_UNKNOWN}")
    if not expected and (merged or widened):
        first = (merged + widened)[0]
        warnings.warn(f"whether the layer behind {first!r} alone reads its weight {_UNKNOWN}", stacklevel=5)
    equal = _are_close(plain, expected, computed)
    when = ""
    # A model may use some weights only in training. Inserted blocks and additional units draw other random numbers.
    if equal and merged and not inserted and not widened:
        equal = _are_close(plain, *_compute_both(model, plain, kept, training_blocks=blocks))
        when = " in training mode"
    if equal:
        return
    # Name all possible causes.
    causes = [
        f"a block inserted behind {name!r} is not run as the next one: the model does not go through its nn.ModuleList "
        "in turn"
        for name in inserted[:1]
    ]
    causes += [
        f"what was added to the weight of {name!r} does not do what its seed did{when}: something else reads that "
        "weight, too, or changes what the layer returns"
        for name in merged[:1]
    ]
    causes += [
        f"the units that were added to the layers of {name!r} do not do what their seed did: something else reads the "
        "weights, too, or changes what the layers return"
        for name in widened[:1]
    ]
    causes += [f"a copy of the block {name!r} does not do what its seed did" for name in blocks[:1]]
    raise ExportError(f"{', or '.join(causes)}; save the growing model with esper.save")


def _compute_both(
    model: GrowingModel, plain: nn.Module, kept: list[str], training_blocks: list[str] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of both models for the example input, with the same random numbers; empty if they cannot be compared.

    Both are in evaluation mode or, with ``training_blocks`` (slots whose seeds are blocks), in training mode. Even
    then, torch's own layers and other seeds stay in evaluation mode, so that there is no dropout and no batch is too
    small for statistics. This shows what the host's own code does in training.
    """
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    if model.example.arguments is None:
        return outputs
    example = fit_example(model.host, model.example.arguments, model.slots.values()[0].anchor)
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
            with side_pass(network, ()):
                try:
                    returned = find_tensors(call_host(network, example))
                except Exception:
                    if training_blocks is not None and network is model:  # the example is none for training
                        return [], []
                    raise
                tensors += [part for part in returned if part.is_floating_point() and not part.is_nested]
    return outputs


def _are_close(network: nn.Module, expected: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether all outputs of a network are equal up to rounding."""
    return len(expected) == len(outputs) and all(map(functools.partial(_is_close, network), expected, outputs))


def _is_close(network: nn.Module, expected: Tensor, output: Tensor) -> bool:
    """Whether two outputs of a network are equal up to rounding, relative to the largest value."""
    if (expected.shape, expected.dtype) != (output.shape, output.dtype):
        return False
    # A tolerance for the least precise dtype, and for TF32 on accelerators.
    finite, types = expected[expected.isfinite()], {expected.dtype, *(values.dtype for values in network.parameters())}
    rounding = max(torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point)
    if expected.device.type != "cpu":
        rounding = max(rounding, TF32)
    tolerance = max(TOLERANCE, 8 * rounding) * float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(expected, output, rtol=0, atol=tolerance, equal_nan=True)
