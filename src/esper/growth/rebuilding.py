"""Whether the class of a deeper model builds the same from its configuration, as ``from_pretrained`` does."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from esper.growth.depth import CONFIGURATION
from esper.growth.fossils import TRACING_ERRORS

_PLAIN = (bool, int, float, str)


def is_built_alike(model: nn.Module) -> bool:
    """Whether ``type(model)(model.config)`` has tensors of the same names and shapes, and the same plain attributes
    wherever these differ from block to block, such as a block's number or the width of its window.

    What is built has no values, so that it costs no memory. What cannot be built so is not alike.
    """
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = type(model)(copy.deepcopy(vars(model)[CONFIGURATION]))
    except (*TRACING_ERRORS, NotImplementedError):
        return False
    wanted, found = ({name: value.shape for name, value in one.state_dict().items()} for one in (model, built))
    return wanted == found and _list_varying(model) == _list_varying(built)


def _list_varying(model: nn.Module) -> dict[str, list[Any]]:
    """By name, plain attributes of modules whose names differ by numbers alone, where their values differ."""
    values: dict[str, list[Any]] = defaultdict(list)
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN) and name != "training":
                values[re.sub(r"\b\d+\b", "*", f"{path}.{name}")].append(value)
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}
