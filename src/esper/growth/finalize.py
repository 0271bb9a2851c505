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
from types import CodeType
from typing import TYPE_CHECKING, cast

import torch
from torch import fx, nn

from esper.errors import ExportError, SlotError
from esper.growth.blueprints.registry import Folded, Reads
from esper.growth.depth import Depth, deepen
from esper.growth.fossils import ALPHA, BLOCK, TracedFossil, mix_in_block, relay_input, trace
from esper.growth.hooks import require_attached
from esper.growth.positions import find_output_tensor
from esper.growth.pretrained import refuse_saving
from esper.growth.probe import call, convert
from esper.growth.seed import Seed
from esper.growth.side_pass import keep_modes
from esper.growth.slot import Slot
from esper.lifecycle.rules import Isolation

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

PREFIX = "fossil_"
"""Begins the names of fossils in the submodules that they follow."""
TOLERANCE = 1e-3
"""Between a block that is added with weight 1 and one that follows."""
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
    inserted, foreign, called = list[str](), list[str](), dict[str, nn.Module]()
    for name in kept:
        slot, seed = grown.slots[name], grown.seeds[name]
        folded = seed.blueprint.fold(host, names[name], float(seed.alpha))
        if folded is Folded.INSERTED:
            inserted.append(name)
            names = {other: _move(path, names[name]) for other, path in names.items()}
        if folded is Folded.NOT and _must_call(slot, seed):
            called[name] = _keep_block(host, names[name], slot, seed)
            foreign.append(name)
        elif folded is Folded.NOT:
            traced = trace(seed, slot.site, name)
            _fold(host, names[name], type(seed.blueprint).name, traced, grown.tap.place)
            _keep_padded(host, names[name])
            foreign.append(name)
    if inserted:
        deepen(host, {names[name]: name for name in inserted})
    depth = Depth(host)
    for name, block in called.items():
        depth.follow(names[name], block)
    if inserted:
        _require_equal(model, host, kept, inserted)
    refuse_saving(host, [names[name] for name in foreign], [names[name] for name in inserted])
    return host


def _must_call(slot: Slot, seed: Seed) -> bool:
    """Whether no graph can stand for the seed, as its block is called with more than features."""
    layer = slot.site.layer
    return seed.reads is Reads.CALL and (layer is None or not layer.alone)


def _keep_block(host: nn.Module, behind: str, slot: Slot, seed: Seed) -> nn.Module:
    """Let a copy of a block run behind the block itself, called as it is, and mix what both return; returns the copy.

    Raises:
        ExportError: the block would run it by itself, in another way.
    """
    followed, block, kind = host.get_submodule(behind), seed.blueprint.find_block(), seed.blueprint.name
    if block is None or _runs_what_it_holds(followed):
        raise ExportError(
            f"{kind!r} in slot {slot.name!r} counts with {float(seed.alpha):.2f} in a module that runs whatever it "
            "holds: with a weight of 1 it can be part of a plain model; save the growing model by esper.save"
        )
    warnings.warn(
        f"{kind!r} in slot {slot.name!r} counts with {float(seed.alpha):.2f}: it runs behind its block; with a weight "
        "of 1 it would be the next one; save_pretrained is refused",
        stacklevel=4,
    )
    fossil = _find_unused_name(followed, PREFIX + kind)
    kept = nn.ModuleDict({BLOCK: block})
    kept.register_buffer(ALPHA, seed.alpha)
    followed.add_module(fossil, kept)
    followed.register_forward_hook(mix_in_block(fossil), with_kwargs=True)
    return block


def _require_equal(model: GrowingModel, plain: nn.Module, kept: list[str], inserted: list[str]) -> None:
    """Whether whoever owns the containers runs what was ``inserted`` there, as ``plain`` then computes as the model.

    Raises:
        ExportError: it does not, or that cannot be found out.
    """
    if model.example.arguments is None:
        raise ExportError(
            f"whether the model runs a block behind {inserted[0]!r} cannot be found out with a growing model "
            "that was pickled: finalize the one that esper.attach or esper.load returned"
        )
    example = convert(model.example.arguments, model.slots.values()[0].anchor)
    with ExitStack() as stack:
        for network in (model, plain):
            stack.enter_context(keep_modes(network))
            network.eval()
        for name, slot in model.slots.items():
            if name not in kept:
                stack.enter_context(slot.vacate())
        stack.enter_context(torch.no_grad())
        wanted, found = (find_output_tensor(call(network, example)) for network in (model, plain))
    if wanted is None or found is None or not torch.allclose(wanted, found, rtol=TOLERANCE, atol=TOLERANCE):
        raise ExportError(
            f"a block inserted behind {inserted[0]!r} is not run as the next one: the model does not go through its "
            "nn.ModuleList in turn; save the growing model by esper.save"
        )


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
    followed = host.get_submodule(behind)
    fossil = _find_unused_name(followed, PREFIX + kind)
    if _runs_what_it_holds(followed):
        owner, path, prefix = followed, behind, f"{fossil}_"
    else:
        # It returns what it is given, and its hook makes of that what the fossil does.
        owner, path, prefix = nn.Identity(), f"{behind}.{fossil}", ""
        count = sum(tensor.numel() for tensor in traced.tensors.values() if isinstance(tensor, nn.Parameter))
        vars(owner)["extra_repr"] = functools.partial(str, f"what grew: {kind}, {count} parameters")
        followed.add_module(fossil, owner)
        if type(followed).forward is not nn.Sequential.forward:  # which runs it by itself
            followed.register_forward_hook(_make_call(fossil))
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

    It may if it is a container with a forward pass, or if a method of its class asks for its children.
    """
    if type(module).forward is nn.Sequential.forward:
        return False
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return True
    own = (kind for kind in type(module).__mro__ if kind is not nn.Module and issubclass(kind, nn.Module))
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
        told = "; ".join(_describe(name, seed) for name, seed in live.items())
        raise SlotError(
            f"unfinished seeds: {told}; call finish() of their grower, fossilize or prune them, or say what becomes of "
            "them: finalize(unfinished='keep') or 'drop'"
        )
    if live and keeps:
        told = "; ".join(
            f"{'kept' if name in kept else 'dropped'} {_describe(name, seed)}" for name, seed in live.items()
        )
        warnings.warn(
            f"unfinished seeds: {told}; call finish() of their grower first to have them measured and judged, or say "
            "finalize(unfinished='drop') to drop them all",
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
    known = seed.contribution is not None and not math.isnan(seed.contribution)
    contribution = f"contribution {seed.contribution:+.4f}" if known else "contribution not measured"
    return f"{seed.blueprint.name} in {name!r} (alpha {float(seed.alpha):.2f}, {contribution})"
