"""Make an ordinary module of a growing model: what stays is folded in, all else dropped."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from enum import StrEnum
from inspect import Parameter
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from esper.errors import ExportError, SlotError
from esper.growth.blueprints.registry import Context, Folded
from esper.growth.depth import Depth, deepen
from esper.growth.fossils import ALPHA, BLOCK, TracedFossil, mix_alone, mix_in_block, relay_input, trace
from esper.growth.hooks import require_attached
from esper.growth.positions import list_argument_names
from esper.growth.pretrained import refuse_saving
from esper.growth.probe import call_host, fit_example
from esper.growth.seed import Seed
from esper.growth.side_pass import keep_modes, side_pass
from esper.growth.slot import Slot
from esper.growth.taps import find_tensors
from esper.lifecycle.rules import Isolation

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Begins the names of fossils in the submodules that they follow."""
TOLERANCE = 1e-3
"""Between what both models compute, as a share of the largest value; more where numbers are coarser than float32."""
TF32 = 2**-10
"""Rounding of the factors that accelerators may multiply in place of float32 ones."""
_UNKNOWN = (
    "cannot be found out where a model returns no tensors, or was pickled, which loses the example input: finalize the "
    "one that esper.attach or esper.load returned"
)
"""Ends the sentence that says what."""
_ASKING = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
"""What a module asks of itself that runs whatever it holds."""


def finalize(model: GrowingModel, unfinished: Unfinished) -> nn.Module:
    """A copy of the host with its seeds folded in; see `GrowingModel.finalize`.

    Raises:
        ExportError: `torch.export` cannot trace a seed's blueprint.
        SlotError: there are unfinished seeds, which ``unfinished`` forbids; or a slot is not called any more.
    """
    require_attached(model)
    kept = choose_kept(model, unfinished)
    grown = copy.deepcopy(model)
    grown.release()
    host, names = grown.host, {name: name for name in kept}
    became, called = dict[str, Folded](), dict[str, nn.Module]()
    for name in kept:
        slot, seed = grown.slots[name], grown.seeds[name]
        became[name] = seed.blueprint.fold(host, names[name], float(seed.alpha))
        if became[name] is Folded.INSERTED:
            names = {other: _move(path, names[name]) for other, path in names.items()}
        if became[name] is Folded.NOT:
            block = _follow(host, names[name], slot, seed, grown.tap.place)
            if block is not None:
                called[name] = block
    ways = (Folded.NOT, Folded.MERGED, Folded.INSERTED)
    foreign, merged, inserted = ([name for name in kept if became[name] is way] for way in ways)
    if inserted:
        deepen(host, {names[name]: name for name in inserted})
    depth = Depth(host)
    for name, block in called.items():
        depth.follow(names[name], block)
    if inserted or merged or called:
        _require_equal(model, host, kept, inserted, merged, list(called))
    refuse_saving(host, [names[name] for name in foreign], [names[name] for name in inserted])
    return host


def _follow(host: nn.Module, behind: str, slot: Slot, seed: Seed, place: int | str) -> nn.Module | None:
    """Let a seed run behind the host's submodule ``behind``: a copy of a block as it is, which is returned, or a graph.

    A block may be called with more than features, and in training drop out or gather statistics: a graph does not.
    Where the submodule runs whatever it holds, there is no place for a block.

    Raises:
        ExportError: a graph cannot do it, nor is there a place for the block.
    """
    followed, block, layer = host.get_submodule(behind), seed.blueprint.find_block(), slot.site.layer
    alpha, what = float(seed.alpha), f"{seed.blueprint.name!r} in slot {slot.name!r}"
    placed = block is not None and not _runs_what_it_holds(followed)
    if seed.reads is Context.CALL and not placed and layer is not None and not layer.alone:
        raise ExportError(
            f"{what} counts with {alpha:.2f} in a module that runs whatever it holds: with a weight of 1 it can be "
            "part of a plain model; save the growing model by esper.save"
        )
    if block is not None and (alpha != 1 or not placed):
        how = "" if placed else ", as a graph, which neither drops out nor gathers statistics in training"
        warnings.warn(
            f"{what} counts with {alpha:.2f}: it runs behind its block{how}; in a list of blocks it would be the next "
            "one with a weight of 1; save_pretrained is refused",
            stacklevel=5,
        )
    if block is not None and placed:
        _keep_block(followed, PREFIX + seed.blueprint.name, block, seed.alpha)
    else:
        _fold(host, behind, seed.blueprint.name, trace(seed, slot.site, slot.name), place)
    _keep_padded(host, behind)
    return block if placed else None


def _keep_block(followed: nn.Module, wanted: str, block: nn.Module, alpha: Tensor) -> None:
    """Let a copy of a block run behind the block ``followed``, called as it is, and mix what both return."""
    alone, kept = _takes_one_argument(followed), nn.Identity()
    kept.add_module(BLOCK, block)
    kept.register_buffer(ALPHA, alpha)
    fossil = _hold(followed, wanted, kept, calls=alone)
    if alone:  # whatever the example was, there is nothing but features
        kept.register_forward_hook(mix_alone())
    else:
        first = next(iter(list_argument_names(followed)), "")
        followed.register_forward_hook(mix_in_block(fossil, first), with_kwargs=True)


def _takes_one_argument(block: nn.Module) -> bool:
    """Whether a block can be called with nothing but features."""
    try:
        parameters = list(inspect.signature(block.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and parameters[0].kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _hold(followed: nn.Module, wanted: str, fossil: nn.Module, *, calls: bool = True) -> str:
    """Let ``followed`` hold a fossil, and give it what it returns if it ``calls`` it; returns the name."""
    name, fossil.training = _find_unused_name(followed, wanted), followed.training
    followed.add_module(name, fossil)
    if calls and type(followed).forward is not nn.Sequential.forward:  # which runs it by itself
        followed.register_forward_hook(_make_call(name))
    return name


def _require_equal(
    model: GrowingModel, plain: nn.Module, kept: list[str], inserted: list[str], merged: list[str], called: list[str]
) -> None:
    """Whether ``plain`` computes as the model: whether whoever owns the containers runs what was ``inserted`` there,
    the layers alone read the weights that something was ``merged`` into, and copies of blocks are ``called`` as before.

    Raises:
        ExportError: it does not; or something was inserted, and that cannot be found out.
    """
    expected, output = _compute_both(model, plain, kept)
    if not expected and inserted:
        raise ExportError(f"whether the model runs a block behind {inserted[0]!r} {_UNKNOWN}")
    if not expected and merged:
        warnings.warn(f"whether the layer behind {merged[0]!r} alone reads its weight {_UNKNOWN}", stacklevel=5)
    if len(expected) == len(output) and all(_is_close(plain, *pair) for pair in zip(expected, output, strict=True)):
        return
    why = [
        f"a block inserted behind {name!r} is not run as the next one: the model does not go through its nn.ModuleList "
        "in turn"
        for name in inserted[:1]
    ]
    why += [
        f"what was added to the weight of {name!r} does not do what its seed did: something else reads that weight, "
        "too, or changes what the layer returns"
        for name in merged[:1]
    ]
    why += [f"a copy of the block {name!r} does not do what its seed did" for name in called[:1]]
    raise ExportError(f"{', or '.join(why)}; save the growing model by esper.save")


def _compute_both(model: GrowingModel, plain: nn.Module, kept: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """What both return of floating-point tensors for the example input, with the same random numbers, if any."""
    if model.example.arguments is None:
        return [], []
    example = fit_example(model.host, model.example.arguments, model.slots.values()[0].anchor)
    with ExitStack() as stack:
        for network in (model, plain):
            stack.enter_context(keep_modes(network))
            network.eval()
        for name, slot in model.slots.items():
            if name not in kept:
                stack.enter_context(slot.disabled())
        stack.enter_context(torch.no_grad())
        returned: list[list[Tensor]] = []
        for network in (model, plain):
            with side_pass(network, ()):
                returned.append(_list_outputs(call_host(network, example)))
    return returned[0], returned[1]


def _list_outputs(returned: Any) -> list[Tensor]:
    """The floating-point tensors in what a network returned."""
    return [one for one in find_tensors(returned) if one.is_floating_point() and not one.is_nested]


def _is_close(network: nn.Module, expected: Tensor, output: Tensor) -> bool:
    """Whether two outputs of a network are equal but for rounding, by the largest value and the coarsest numbers."""
    if (expected.shape, expected.dtype) != (output.shape, output.dtype):
        return False
    finite, types = expected[expected.isfinite()], {expected.dtype, *(one.dtype for one in network.parameters())}
    rounding = max(torch.finfo(one).eps for one in types if one.is_floating_point)
    if expected.device.type != "cpu":
        rounding = max(rounding, TF32)
    tolerance = max(TOLERANCE, 8 * rounding) * float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(expected, output, rtol=0, atol=tolerance, equal_nan=True)


def _move(path: str, inserted: str) -> str:
    """Where the submodule ``path`` is when another module was inserted behind ``inserted``."""
    parent, _, place = inserted.rpartition(".")
    behind = path.removeprefix(f"{parent}." if parent else "")
    if behind == path and parent:
        return path
    first, dot, rest = behind.partition(".")
    if not first.isdecimal() or int(first) <= int(place):
        return path
    return ".".join(part for part in (parent, str(int(first) + 1)) if part) + dot + rest


def _keep_padded(host: nn.Module, submodule: str) -> None:
    """Let torch's encoder around ``submodule`` go on with padded examples in eval mode, as it does in training.

    It would make them a nested tensor, which a graph cannot read. At padding, where it then leaves zeros, come other
    values that mean nothing, as in training.
    """
    for name, module in cast(Iterator[tuple[str, nn.Module]], host.named_modules()):
        if isinstance(module, nn.TransformerEncoder) and submodule.startswith(f"{name}." if name else ""):
            module.enable_nested_tensor = module.use_nested_tensor = False


def _fold(host: nn.Module, behind: str, kind: str, traced: TracedFossil, place: int | str) -> None:
    """Let a traced fossil follow the host's submodule ``behind``."""
    owner = followed = host.get_submodule(behind)
    if _runs_what_it_holds(followed):
        path, prefix = behind, f"{_find_unused_name(followed, PREFIX + kind)}_"
    else:
        # It returns what it is given, and its hook makes of that what the fossil does.
        owner, prefix = nn.Identity(), ""
        count = sum(tensor.numel() for tensor in traced.tensors.values() if isinstance(tensor, nn.Parameter))
        vars(owner)["extra_repr"] = functools.partial(str, f"what grew: {kind}, {count} parameters")
        path = f"{behind}.{_hold(followed, PREFIX + kind, owner)}"
    inputs = None
    if traced.reads_inputs:
        inputs = _find_unused_name(owner, f"{prefix}inputs")
        relay_input(host, path, inputs, place)
    names: dict[str, str] = {}
    for name, tensor in traced.tensors.items():
        names[name] = _find_unused_name(owner, prefix + name.removeprefix("blueprint.").replace(".", "_"))
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(names[name], tensor)
        else:
            owner.register_buffer(names[name], tensor)
    owner.register_forward_hook(traced.hook(names, inputs))


def _runs_what_it_holds(module: nn.Module) -> bool:
    """Whether a module may run all that is registered in it, in a way of its own, so that a fossil there might disturb.

    It may if it is a container with a forward pass, or if a method of its class asks for its children, which torch's
    own layers do only to look at hooks.
    """
    if type(module).forward is nn.Sequential.forward:
        return False
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return True
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    own = (kind for kind in kinds if not kind.__module__.startswith("torch.nn."))
    methods = (method for kind in own for method in vars(kind).values() if inspect.isfunction(method))
    return any(not _ASKING.isdisjoint(_collect_names(method.__code__)) for method in methods)


def _collect_names(code: CodeType) -> set[str]:
    """What a function asks for by name, with the functions within it."""
    return set(code.co_names).union(*(_collect_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _make_call(submodule: str) -> fx.GraphModule:
    """A forward hook that gives the output to a submodule of the module that it hooks."""
    graph = fx.Graph()
    module, _, features = (graph.placeholder(name) for name in ("module", "arguments", "features"))
    graph.output(graph.call_method(submodule, (module, features)))
    return fx.GraphModule(nn.Module(), graph, class_name="RunFossil")


def _find_unused_name(module: nn.Module, wanted: str) -> str:
    """An attribute that ``module`` does not have yet; it may carry fossils of an earlier growth."""
    taken = set(dir(module))
    while wanted in taken:
        wanted += "_"
    return wanted


class Unfinished(StrEnum):
    """What to do with live seeds."""

    KEEP = "keep"
    """Fold in those that count and were not measured to do harm, as they are; drop the others; warn of either."""
    DROP = "drop"
    """Drop them all. The host, which has learned together with them, may do much worse then."""
    RAISE = "raise"
    """Refuse a model that has any."""


def choose_kept(model: GrowingModel, unfinished: Unfinished) -> list[str]:
    """The slots whose seeds are to be part of the plain model: all fossils, and what ``unfinished`` says of the others.

    Raises:
        SlotError: there are unfinished seeds, which ``unfinished`` forbids.
    """
    live = {name: seed for name, seed in model.seeds.items() if not seed.fossilized}
    keeps = unfinished is Unfinished.KEEP
    kept = [name for name, seed in live.items() if keeps and _takes_part(seed) and not _does_harm(seed)]
    if live and unfinished is Unfinished.RAISE:
        seeds_text = "; ".join(_describe(name, seed) for name, seed in live.items())
        raise SlotError(
            f"unfinished seeds: {seeds_text}; call finish() of their grower, fossilize or prune them, or say what "
            "becomes of them: finalize(unfinished='keep') or 'drop'"
        )
    if live and keeps:
        seeds_text = "; ".join(
            f"{'kept' if name in kept else 'dropped'} {_describe(name, seed)}" for name, seed in live.items()
        )
        warnings.warn(
            f"unfinished seeds: {seeds_text}; call finish() of their grower first to have them measured and judged, or "
            "say finalize(unfinished='drop') to drop them all",
            stacklevel=5,
        )
    return [name for name, seed in model.seeds.items() if seed.fossilized or name in kept]


def _takes_part(seed: Seed) -> bool:
    """Whether the seed takes part in what the model computes."""
    return seed.isolation is Isolation.NONE and float(seed.alpha) > 0


def _does_harm(seed: Seed) -> bool:
    """Whether the model was measured to do better without the seed; never, if nobody measured."""
    return seed.contribution is not None and seed.contribution < 0


def _describe(name: str, seed: Seed) -> str:
    measured = seed.contribution is not None and not math.isnan(seed.contribution)
    contribution = f"contribution {seed.contribution:+.4f}" if measured else "contribution not measured"
    return f"{seed.blueprint.name} in {name!r} (alpha {float(seed.alpha):.2f}, {contribution})"
