"""Checks that a host calls its slots, and contexts of passes: without growth, and without side effects."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from esper.errors import SlotError
from esper.growth.seed import Seed
from esper.growth.slot import Slot
from esper.growth.taps import SourceTap, find_hook_tables, list_named_modules, require_unsharded
from esper.numerics.module_state import keep_buffers, keep_generators, keep_modes

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


_FAST_PATH_MODULES = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that use another path, with different rounding, if they have no hooks."""


def require_attachable(host: nn.Module) -> None:
    """Reject a host that cannot get slots."""
    require_unsharded(host)
    name = find_attached(host)
    if name is not None:
        raise SlotError(
            f"the model already has growth slots, one behind {name!r}: use what esper.attach returned then, or call "
            "its release() first"
        )


def find_attached(model: nn.Module) -> str | None:
    """The name of a submodule with a slot after it; None if there is none."""
    for name, part in list_named_modules(model):
        if any(isinstance(hook, Slot) for hook in _list_hooks(part)):
            return name
    return None


def require_attached(model: GrowingModel) -> None:
    """Reject what `require_savable` rejects, and a model of which a slot is switched off."""
    for slot in model.slots.values():  # first, as hooks may be off while slots are
        slot.require_not_disabled()
    require_savable(model)


def require_savable(model: GrowingModel) -> None:
    """Reject a model that is sharded, without its growth, or whose host no longer calls its slots."""
    for slot in model.slots.values() if model.hidden else ():
        slot.require_not_disabled()
    require_unsharded(model)
    modules = dict(list_named_modules(model.host, remove_duplicate=False))
    # The slot and its other hooks must be among the hooks of the module that currently has its name.
    for name, slot in model.slots.items():
        for place, hook in ((name, slot), *((first, slot.source) for first in slot.chain[:1])):
            if place not in modules or hook not in _list_hooks(modules[place]):
                raise SlotError(
                    f"slot {name!r} is no longer called: the model was released, or its submodule {place!r} was "
                    "replaced or lost its hooks after esper.attach; change the host first, then attach"
                )


@contextmanager
def hide_growth(model: GrowingModel) -> Generator[None]:
    """Context manager in which the host computes without growth; see `GrowingModel.without_growth`."""
    if torch.compiler.is_compiling():  # torch then runs the function uncompiled, unless it is told not to
        raise SlotError("a compiled function cannot switch growth off: call it within model.without_growth()")
    if model.hidden:
        yield
        return
    with ExitStack() as stack:
        # Configurations do not count grown blocks, and slots return the host's features.
        stack.enter_context(model.depth.without_blocks())
        for slot in model.slots.values():
            stack.enter_context(slot.disabled())
        if any(isinstance(part, _FAST_PATH_MODULES) for part in model.host.modules()):
            # Without hooks, these modules use their fast path, so outputs are bitwise those before growth. Nothing is
            # compiled meanwhile: hooks have no guards, so a graph without slots would be used with slots afterwards.
            with suppress(RuntimeError):  # called by a compiled function, where the hooks must stay
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_remove_hooks(model))
        model.hidden = True
        try:
            yield
        finally:
            model.hidden = False


@contextmanager
def _remove_hooks(model: GrowingModel) -> Generator[None]:
    """Context manager in which the host does not call its slots."""
    # Removed from torch's tables and put back, because handles cannot do that.
    names = {name: None for slot in model.slots.values() for name in (slot.name, *slot.chain[:1])}
    tables = [table for name in names for table in find_hook_tables(model.host.get_submodule(name))]
    before = [dict(table) for table in tables]
    kinds = (Slot, SourceTap)
    for table in tables:
        for key in [key for key, hook in table.items() if isinstance(hook, kinds)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            merged = {key: hook for key, hook in hooks.items() if key in table or isinstance(hook, kinds)} | dict(table)
            table.clear()  # to restore the order of calls, too
            table.update(merged)


def _list_hooks(module: nn.Module) -> list[Any]:
    return [hook for table in find_hook_tables(module) for hook in table.values()]


@contextmanager
def side_pass(network: nn.Module, seeds: Iterable[Seed]) -> Generator[None]:
    """Context manager in which ``seeds`` of ``network`` are at full weight, and passes have no side effects.

    Changes of buffers are undone, and random generators are restored. The buffers are other tensors within the context,
    so a pass from before it can still be differentiated after it. Feature hooks of slots are off.
    """
    # Passes write to clones of the buffers, and no hook records them.
    feature_hooks = [(module, module.feature_hook) for module in network.modules() if isinstance(module, Slot)]
    for slot, _ in feature_hooks:
        slot.feature_hook = None
    try:
        with ExitStack() as stack:
            stack.enter_context(keep_buffers(network))
            stack.enter_context(keep_generators(network))
            for seed in seeds:
                stack.enter_context(seed.temporary_alpha(1.0))
            yield
    finally:
        for slot, feature_hook in feature_hooks:
            slot.feature_hook = feature_hook


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Generator[None]:
    """Context manager in which ``model`` is in evaluation mode, differentiable and uncompiled.

    Modes, buffers and random generators are restored afterwards.
    """
    with ExitStack() as stack:
        # Gradients are needed even if the caller has disabled them, and hooks do not run in compiled code.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # its RNNs learn in training mode only
        stack.enter_context(side_pass(model, ()))
        stack.enter_context(keep_modes(model))
        model.eval()
        yield
