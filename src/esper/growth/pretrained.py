"""Reject ``save_pretrained`` if ``from_pretrained``, which builds the class from a configuration, would lose growth.

Hugging Face models have this method and ``push_to_hub``. Each is replaced by an attribute of the instance that raises
an error.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.testing import assert_close

from esper.errors import ExportError
from esper.growth.depth import CONFIGURATION
from esper.growth.fossils import TRACING_ERRORS
from esper.growth.taps import list_named_modules

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


_PLAIN_TYPES = (bool, int, float, str)


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


METHODS = ("save_pretrained", "push_to_hub")
_OWN_STATE = "state_dict"
"""Keyword of calls that write checkpoints for the same structure, for instance by Hugging Face's Trainer."""
_GROWING = (
    "save_pretrained would lose what grew in this model, because from_pretrained builds it without: save the growing "
    "model by esper.save, or what finalize() returns by esper.export"
)
_PLAIN = (
    "from_pretrained would lose what grew in this model, because it builds it without: keep the model itself by "
    "torch.save, or write it by esper.export, or save the growing model by esper.save before finalize()"
)
_DEEPER = (
    "from_pretrained would build another model than this deeper one: its configuration does not count its blocks, "
    "or blocks depend on their number in another way than it states; keep the model itself by torch.save, or "
    "write it by esper.export, or save the growing model by esper.save before finalize()"
)
_WIDER = (
    "from_pretrained would build another model than this wider one: its configuration has no number of hidden units, "
    "or one number for layers of which only some became wider, or not by as many; let as many units grow in each of "
    "them, keep the model itself by torch.save, or write it by esper.export, or save the growing model by esper.save "
    "before finalize()"
)
_CHECKPOINT = (
    "this checkpoint is for the finalized model alone, to be read by its load_state_dict: from_pretrained would lose "
    "what grew in it"
)


class SaveGuard:
    """Replaces a method that saves a part of a host, and raises an error while the model has seeds.

    Args:
        model: The growing model.
        part: The host, or a part of it.
        method: Name of the method.
    """

    def __init__(self, model: GrowingModel, part: nn.Module, method: str) -> None:
        self._model, self._part, self._method = model, part, method
        self._before = vars(part).get(method)
        """An attribute of the instance that already replaced the method, as in a host that was finalized before."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the method.

        Raises:
            ExportError: the model has seeds.
        """
        if self._model.seeds:
            raise ExportError(_GROWING)
        # Call the previous attribute of the instance, or else the class's method.
        if self._before is not None:
            return self._before(*arguments, **keywords)
        return getattr(type(self._part), self._method)(self._part, *arguments, **keywords)

    def remove(self) -> None:
        """Restore the method."""
        del vars(self._part)[self._method]
        if self._before is not None:
            vars(self._part)[self._method] = self._before


def guard_saving(model: GrowingModel) -> list[SaveGuard]:
    """Make Hugging Face methods that save parts of the host raise an error while the model has seeds."""
    guards: list[SaveGuard] = []
    for part, method in _list_methods(model.host, model.slots):
        guards.append(SaveGuard(model, part, method))
        vars(part)[method] = guards[-1]
    return guards


def refuse_saving(
    plain: nn.Module,
    grown: Iterable[str],
    inserted: Iterable[str] = (),
    widened: Iterable[str] = (),
    losing: Iterable[nn.Module] = (),
) -> None:
    """Make Hugging Face methods that save parts of ``plain`` raise an error if ``from_pretrained`` would lose growth.

    These are the parts with a submodule in which something grew; parts with ``inserted`` blocks that the configuration
    does not count, or that depend on their place in another way than the configuration defines; parts with ``widened``
    layers whose width the configuration does not define; and the parts ``losing``, which would tie a changed weight
    again.

    This does not need Esper: it consists of torch and Python objects only, and is copied and pickled with the module.
    Calls with ``state_dict``, which write checkpoints, only warn.
    """
    # Parts with fossils, which the class lacks, or with a weight that the class would tie again.
    refused = [(part, method, _PLAIN) for part, method in _list_methods(plain, grown)]
    refused += [
        (part, method, _PLAIN) for part in losing for method in METHODS if callable(getattr(type(part), method, None))
    ]
    parts = {part for part, _, _ in refused}
    # Parts that became deeper or wider, if the class does not build them from their configuration.
    changed = {
        (part, method): reason
        for names, reason in ((widened, _WIDER), (inserted, _DEEPER))
        for part, method in _list_methods(plain, names)
        if part not in parts
    }
    unlike = {part: not is_built_alike(part) for part in {part for part, _ in changed}}
    refused += [(part, method, reason) for (part, method), reason in changed.items() if unlike[part]]
    # Replace each method by a graph that raises an error.
    for part, method, reason in refused:
        # A graph cannot unpack arguments, but a thread that is run, not started, calls its target with them at once.
        functions = (assert_close, warnings.warn, threading.Thread, type(part), part)
        vars(part)[method] = functools.partial(_make_refusal(method, reason), *functions)


def _list_methods(host: nn.Module, slots: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Parts of the host with one of the slots, the host included, each with the methods that save it."""
    names = [f"{name}." for name in slots]
    return [
        (part, method)
        for name, part in list_named_modules(host)
        if any(slot_name.startswith(name and f"{name}.") for slot_name in names)
        for method in METHODS
        if callable(getattr(type(part), method, None))
    ]


def _make_refusal(method: str, reason: str) -> fx.GraphModule:
    """A graph that raises AssertionError, or warns and calls the method, if there is a ``state_dict``.

    All functions that it calls are arguments: a graph that is unpickled runs once without values, and calls of
    arguments are only recorded then.
    """
    graph = fx.Graph()
    names = ("expect", "warn", "later", "kind", "part", "*arguments", "**keywords")
    expect, warn, later, kind, part, arguments, keywords = map(graph.placeholder, names)

    def call(function: fx.Node, *values: Any, **named: Any) -> fx.Node:
        return graph.call_method("__call__", (function, *values), named)

    # A call without a state dict raises the error; others write a checkpoint, with a warning.
    lacking = graph.call_method("isdisjoint", (graph.call_method("keys", (keywords,)), (_OWN_STATE,)))
    call(expect, lacking, False, msg=reason)
    call(warn, _CHECKPOINT)
    save = graph.call_function(getattr, (kind, method))
    all_arguments = graph.call_function(operator.add, ((part,), arguments))
    graph.call_method("run", (call(later, target=save, args=all_arguments, kwargs=keywords),))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="RefuseSaving")
