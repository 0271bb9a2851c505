"""Deep copies of modules, including modules that keep results of their last pass, which torch refuses to copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from esper.errors import EsperError

T = TypeVar("T")


def copy_with(module: nn.Module, value: T, error: type[EsperError], shared: Iterable[object] = ()) -> T:
    """A deep copy of ``value``, the module or what contains it, in which ``shared`` objects are not copied."""
    # Layers with the old `torch.nn.utils.weight_norm` or `spectral_norm` keep a weight that they compute before each
    # pass. The copy gets its values without the graph.
    memo: dict[int, Any] = {
        id(attribute): attribute.detach().clone()
        for part in module.modules()
        for attribute in vars(part).values()
        if isinstance(attribute, Tensor) and not attribute.is_leaf
    }
    try:
        return copy.deepcopy(value, memo | {id(part): part for part in shared})
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as failure:
        name, reason = type(module).__name__, str(failure).strip().partition("\n")[0].partition(".  ")[0]
        raise error(
            f"{name} cannot be copied ({reason}): let modules keep no locks, open files or generators as attributes, "
            "and no results of a pass in lists"
        ) from failure
