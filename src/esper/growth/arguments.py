"""What models and their slots are made of, as far as users say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.arguments import Kind, file_path, instance

MODULE = instance(
    nn.Module,
    but=(torch.jit.ScriptModule,),
    advice="give an nn.Module, and of scripted or traced ones (torch.jit) the module that they were made of",
)
FOLDER = file_path("give the path of a folder")


def _places(value: Any) -> Any:
    """Names as a list, or by name the blueprints on offer."""
    if isinstance(value, Mapping):
        offers = cast("Mapping[Any, Any]", value)
        if not all(isinstance(name, str) for name in offers):
            raise TypeError
        return {name: given if isinstance(given, str) else _names(given) for name, given in offers.items()}
    return _names(value)


def _names(value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    names = list(cast("Iterable[Any]", value))
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _inputs(value: Any) -> Any:
    """A tensor, a tuple, or a mapping from names."""
    if isinstance(value, Tensor | tuple):
        return cast(object, value)
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in cast("Mapping[Any, Any]", value)):
        raise TypeError
    return cast(object, value)


PLACES = Kind(
    _places,
    "give a list of submodules' names, such as ['layer2'], or a mapping from names to a list of blueprints or 'auto'",
)
INPUTS = Kind(
    _inputs,
    "give what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments",
)
