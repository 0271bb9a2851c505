"""The forward hooks of modules, as they come and go, by the one public way to them: a hook of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Tables = list[Mapping[int, Any]]


def hook_tables(module: nn.Module) -> Tables:
    """Of the module's forward hooks and forward pre-hooks; none, where it takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return _tables([module.register_forward_hook(_nothing), module.register_forward_pre_hook(_nothing)])


def global_hook_tables() -> Tables:
    """Of those that are called for every module."""
    return _tables([register_module_forward_hook(_nothing), register_module_forward_pre_hook(_nothing)])


def _tables(handles: Sequence[RemovableHandle]) -> Tables:
    """The tables that hooks were put in, which are taken out again."""
    tables: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return tables


def _nothing(*_: Any) -> None:
    """As a hook."""
