"""The hooks of a module, which show by the one public way to them: a hook of one's own."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class GrowthHook(nn.Module):
    """A forward hook by which a host grows: copies of a part of the host do without."""


Tables = list[MutableMapping[int, Any]]


def find_hook_tables(module: nn.Module) -> Tables:
    """The tables of the module's forward hooks and forward pre-hooks; none, where it takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return _tables([module.register_forward_hook(_do_nothing), module.register_forward_pre_hook(_do_nothing)])


def find_global_hook_tables() -> Tables:
    """The tables of hooks that are called for every module."""
    return _tables([register_module_forward_hook(_do_nothing), register_module_forward_pre_hook(_do_nothing)])


def _tables(handles: Sequence[RemovableHandle]) -> Tables:
    """The tables that hooks were put in, which are taken out again."""
    tables: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return tables


def _do_nothing(*_: Any) -> None:
    """As a hook."""
