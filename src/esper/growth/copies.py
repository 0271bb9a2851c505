"""Deep copies of modules, including modules that keep results of their last pass, which torch refuses to copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from esper.errors import EsperError

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


KEEP_NO_STATE = "let modules keep no locks, open files or generators as attributes, and no results of a pass in lists"


def copy_module(module: M, error: type[EsperError], replacements: Mapping[int, Any] = MappingProxyType({})) -> M:
    """A deep copy of a module, with parts replaced by ``replacements``, which are keyed by the ids of the parts.

    Raises:
        EsperError: of the type ``error``, if the module contains something that cannot be copied.
    """
    return copy_with(module, module, error, replacements)


def copy_with(
    module: nn.Module, value: T, error: type[EsperError], replacements: Mapping[int, Any] = MappingProxyType({})
) -> T:
    """A deep copy of ``value``, which contains ``module``; see `copy_module`."""
    # Layers with the old `torch.nn.utils.weight_norm` or `spectral_norm` keep a weight that they compute before each
    # pass. The copy gets its values without the graph.
    attributes = (attribute for part in module.modules() for attribute in vars(part).values())
    memo: dict[int, Any] = {
        id(attribute): attribute.detach().clone()
        for attribute in attributes
        if isinstance(attribute, Tensor) and not attribute.is_leaf
    }
    try:
        return copy.deepcopy(value, memo | dict(replacements))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
        name, reason = type(module).__name__, str(failure).strip().partition("\n")[0].partition(".  ")[0]
        raise error(f"{name} cannot be copied ({reason}): {KEEP_NO_STATE}") from failure
