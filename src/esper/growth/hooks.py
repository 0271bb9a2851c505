"""Whether slots can sit on a host, and still do: what would let them grow in vain is refused."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from esper.errors import SlotError
from esper.growth.sharding import require_shared, require_whole, reshard
from esper.growth.slot import Slot, share
from esper.growth.taps import find_hook_tables

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


_TAKING_FAST_PATHS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that compute otherwise where they have hooks."""


def require_attachable(host: nn.Module) -> None:
    """Refuse a host that cannot be given slots.

    Raises:
        SlotError: it has slots already, or its parameters are sharded.
    """
    require_whole(host.named_parameters())
    name = find_attached(host)
    if name is not None:
        raise SlotError(
            f"the model has growth slots already, one behind {name!r}: go on with what esper.attach returned then, "
            "or take them off by its release() first"
        )


def find_attached(model: nn.Module) -> str | None:
    """The name of a submodule behind which there is a slot; None if there is none."""
    named = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    return next((name for name, part in named if any(isinstance(hook, Slot) for hook in _hooks(part))), None)


def require_attached(model: GrowingModel) -> None:
    """Refuse a model whose host does not call its slots any more, or was sharded.

    Raises:
        SlotError: a submodule was replaced since slots were attached, the model was released, or it was sharded; or a
            slot is switched off by a block.
    """
    require_whole(model.named_parameters())
    _require_seen(model)  # first, as hooks may be off there
    require_called(model)


def _require_seen(model: GrowingModel) -> None:
    for slot in model.slots.values():
        slot.require_seen()


def require_savable(model: GrowingModel) -> None:
    """Refuse a model whose host does not call its slots any more, or was sharded although what grows in it is not.

    Raises:
        SlotError: a submodule was replaced since slots were attached, the model was released, its host was sharded
            without `GrowingModel.shard_growth`, or growth is out of sight.
    """
    if model.hidden:
        _require_seen(model)
    if not model.sharded:
        require_whole(model.named_parameters())
    require_called(model)


def require_growable(model: GrowingModel) -> None:
    """Refuse a model in which nothing can grow. Of one that processes share each has its own part afterwards.

    Raises:
        SlotError: as `require_savable`; or what grows is to be sharded, and the host is not.
    """
    require_savable(model)
    if model.sharded:
        reshard(model.host)
        require_shared(model.host.parameters())


def require_called(model: GrowingModel) -> None:
    """Refuse a model whose host does not call its slots any more.

    Raises:
        SlotError: a submodule was replaced since slots were attached, or the model was released.
    """
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.host.named_modules(remove_duplicate=False)))
    for name, slot in model.slots.items():
        if name not in modules or slot not in _hooks(modules[name]):
            raise SlotError(
                f"slot {name!r} is not called any more: the model was released, or its submodule {name!r} was replaced "
                "or lost its hooks since esper.attach; rebuild the host first and attach then"
            )


@share
@contextmanager
def hide_growth(model: GrowingModel) -> Generator[None]:
    """Within the block nothing that grew is seen, in any thread; several such blocks may overlap.

    Torch's encoders take a fast path where there are no hooks, which rounds otherwise. There hooks are off, and nothing
    is compiled meanwhile: a graph without slots would be taken for one with them afterwards, as hooks are not guarded.
    So they stay where the block itself is in a function that is compiled.
    """
    with ExitStack() as stack:
        stack.enter_context(model.depth.forget())
        for slot in model.slots.values():
            stack.enter_context(slot.disabled())
        if any(isinstance(part, _TAKING_FAST_PATHS) for part in model.host.modules()):
            with suppress(RuntimeError):  # of torch, where the block itself is in a function that is compiled
                stack.enter_context(_run_eagerly(torch))
                stack.enter_context(_unhook(model))
        model.hidden = True
        try:
            yield
        finally:
            model.hidden = False


@share
def _run_eagerly(_: ModuleType) -> AbstractContextManager[None]:
    """Within the block nothing is compiled, nor what was compiled run.

    Raises:
        RuntimeError: it is within a function that is compiled.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("what is being compiled cannot be run eagerly")
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _unhook(model: GrowingModel) -> Generator[None]:
    """Keep the host from calling its slots within the block."""
    tables = [table for name in model.slots for table in find_hook_tables(model.host.get_submodule(name))]
    before = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if isinstance(hook, Slot)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            here = {key: hook for key, hook in hooks.items() if key in table or isinstance(hook, Slot)} | dict(table)
            table.clear()  # or those that were taken off would be called last from now on
            table.update(here)


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for table in find_hook_tables(module) for hook in table.values()]
