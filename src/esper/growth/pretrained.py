"""Refuse ``save_pretrained`` if ``from_pretrained``, which builds the class from a configuration, would lose growth."""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn

from esper.errors import ExportError
from esper.growth.depth import CONFIGURATION
from esper.growth.fossils import TRACING_ERRORS
from esper.growth.hooks import list_named_modules

METHODS = ("save_pretrained", "push_to_hub")
"""Methods of Hugging Face models that save the class's own parameters and a configuration."""
_LOST = (
    "from_pretrained would lose what grew here, because the configuration does not describe it: save the growing model "
    "by esper.save, or torch.save(plain.state_dict(), file) of what finalize() returned"
)
_PLAIN_TYPES = (bool, int, float, str)


def refuse_while_growing(host: nn.Module, slots: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Make the methods that save parts of a host with slots raise an ExportError; returns parts and methods."""
    refused = [(part, method) for part, method in _list_methods(host, slots) if method not in vars(part)]
    for part, method in refused:
        vars(part)[method] = _raise_lost
    return refused


def _raise_lost(*_: Any, **__: Any) -> NoReturn:
    raise ExportError(_LOST)


def refuse_saving(plain: nn.Module, changed: Iterable[str]) -> None:
    """Make the methods that save parts of ``plain`` raise a KeyError with a sentence, without Esper.

    These are the parts with one of the ``changed`` submodules that ``from_pretrained`` would build in another way.
    """
    for part, method in _list_methods(plain, changed):
        if not is_built_alike(part):
            graph = fx.Graph()
            _, keywords = graph.placeholder("*arguments"), graph.placeholder("**keywords")
            graph.output(graph.call_function(operator.getitem, (keywords, _LOST)))
            vars(part)[method] = fx.GraphModule(nn.Module(), graph, class_name="RefuseSaving")


def _list_methods(host: nn.Module, names: Iterable[str]) -> Iterator[tuple[nn.Module, str]]:
    """Parts of the host around one of the submodules, with each of their methods that saves them."""
    inner = [f"{name}." for name in names]
    for name, part in list_named_modules(host):
        if any(path.startswith(name and f"{name}.") for path in inner):
            for method in METHODS:
                if callable(getattr(type(part), method, None)):
                    yield part, method


def is_built_alike(model: nn.Module) -> bool:
    """Whether ``type(model)(model.config)`` has the same tensors by name and shape, and the same attributes of blocks.

    Only plain attributes that differ between blocks are compared, such as a block's index or the width of its window.
    The model is built without values, which takes no memory. The result is False if it cannot be built.
    """
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = type(model)(copy.deepcopy(vars(model)[CONFIGURATION]))
    except (*TRACING_ERRORS, NotImplementedError):
        return False
    # Shapes of all tensors, and numbers by which blocks depend on their place.
    shapes, built_shapes = (
        {name: value.shape for name, value in module.state_dict().items()} for module in (model, built)
    )
    return shapes == built_shapes and _list_block_attributes(model) == _list_block_attributes(built)


def _list_block_attributes(model: nn.Module) -> dict[str, list[Any]]:
    """Plain attributes that differ between modules whose names differ only by numbers, by name."""
    values: dict[str, list[Any]] = defaultdict(list)
    for path, module in list_named_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN_TYPES) and name != "training":
                values[re.sub(r"\b\d+\b", "*", f"{path}.{name}")].append(value)
    return {name: group for name, group in values.items() if any(value != group[0] for value in group)}
