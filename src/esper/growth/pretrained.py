"""Refuse ``save_pretrained`` where ``from_pretrained`` would lose what grew, as it builds the class by a configuration.

That is a method of Hugging Face's models, as is ``push_to_hub``. An attribute of the instance comes before a method.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.testing import assert_close

from esper.errors import ExportError
from esper.growth.depth import CONFIGURATION
from esper.growth.fossils import TRACING_ERRORS

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


_PLAIN_TYPES = (bool, int, float, str)


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
    expected_shapes, shapes = (
        {name: value.shape for name, value in one.state_dict().items()} for one in (model, built)
    )
    return expected_shapes == shapes and _list_varying(model) == _list_varying(built)


def _list_varying(model: nn.Module) -> dict[str, list[Any]]:
    """By name, plain attributes of modules whose names differ by numbers alone, where their values differ."""
    values: dict[str, list[Any]] = defaultdict(list)
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN_TYPES) and name != "training":
                values[re.sub(r"\b\d+\b", "*", f"{path}.{name}")].append(value)
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


METHODS = ("save_pretrained", "push_to_hub")
_OWN_STATE = "state_dict"
"""Keyword of those who write checkpoints, which the same structure reads again, as Hugging Face's Trainer does."""
_GROWING = (
    "save_pretrained would lose what grew in this model, because from_pretrained builds it without: save the growing "
    "model by esper.save, or what finalize() returns by esper.export"
)
_PLAIN = (
    "from_pretrained would lose what grew in this model, because it builds it without: keep the model itself by "
    "torch.save, or write it by esper.export, or save the growing model by esper.save before finalize()"
)
_DEEPER = (
    "from_pretrained would build another model than this deeper one: its configuration does not tell how many blocks "
    "there are, or blocks depend on their number in another way than it says; keep the model itself by torch.save, or "
    "write it by esper.export, or save the growing model by esper.save before finalize()"
)
_CHECKPOINT = (
    "this checkpoint is for the finalized model alone, to be read by its load_state_dict: from_pretrained would lose "
    "what grew in it"
)


class SaveGuard:
    """In place of a method of a host's part that saves it; refuses while something grows.

    Args:
        model: Whose seeds count.
        part: The host, or a part of it.
        method: Its name.
    """

    def __init__(self, model: GrowingModel, part: nn.Module, method: str) -> None:
        self._model, self._part, self._method = model, part, method
        self._before = vars(part).get(method)
        """Another attribute in the method's place, as of a host that was finalized once."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the method does, if nothing grows.

        Raises:
            ExportError: something does.
        """
        if self._model.seeds:
            raise ExportError(_GROWING)
        if self._before is not None:
            return self._before(*arguments, **keywords)
        return getattr(type(self._part), self._method)(self._part, *arguments, **keywords)

    def remove(self) -> None:
        """Put back what was there before."""
        del vars(self._part)[self._method]
        if self._before is not None:
            vars(self._part)[self._method] = self._before


def guard_saving(model: GrowingModel) -> list[SaveGuard]:
    """Let no part of the host be saved, by methods of Hugging Face's, while something grows in it."""
    guards: list[SaveGuard] = []
    for part, method in _methods(model.host, model.slots):
        guards.append(SaveGuard(model, part, method))
        vars(part)[method] = guards[-1]
    return guards


def refuse_saving(plain: nn.Module, grown: Iterable[str], inserted: Iterable[str] = ()) -> None:
    """Let no part of ``plain`` be saved, by methods of Hugging Face's, that ``from_pretrained`` would build otherwise.

    Those are the parts that hold a submodule in which something grew, and those with blocks that were ``inserted``, of
    which the configuration does not say so, or that depend on their place in another way than the configuration does.

    It says so without Esper: what stands in the method's place is made of torch and Python alone, and copies and
    pickles with the module. Checkpoints for which the caller gives ``state_dict`` are written, with a warning.
    """
    refused = [(part, method, _PLAIN) for part, method in _methods(plain, grown)]
    parts = {part for part, _, _ in refused}
    deeper = [(part, method) for part, method in _methods(plain, inserted) if part not in parts]
    unlike = {part: not is_built_alike(part) for part in {part for part, _ in deeper}}
    refused += [(part, method, _DEEPER) for part, method in deeper if unlike[part]]
    for part, method, why in refused:
        # A graph cannot unpack arguments; a thread that is run, and not started, calls its target at once with them.
        how = (assert_close, warnings.warn, threading.Thread, type(part), part)
        vars(part)[method] = functools.partial(_refusal(method, why), *how)


def _methods(host: nn.Module, slots: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Parts of the host that one of the slots is in or at, the host included, with those of the methods they have."""
    names = [f"{name}." for name in slots]
    return [
        (part, method)
        for name, part in cast("Iterator[tuple[str, nn.Module]]", host.named_modules())
        if any(one.startswith(name and f"{name}.") for one in names)
        for method in METHODS
        if callable(getattr(type(part), method, None))
    ]


def _refusal(method: str, why: str) -> fx.GraphModule:
    """An AssertionError, or a warning and the method, given how to do each, a class, a module and the arguments.

    It knows no function by itself: a graph that is unpickled runs once without values, and calls of what it was given
    are then only noted.
    """
    graph = fx.Graph()
    names = ("expect", "warn", "later", "kind", "part", "*arguments", "**keywords")
    expect, warn, later, kind, part, arguments, keywords = map(graph.placeholder, names)

    def call(function: fx.Node, *values: Any, **named: Any) -> fx.Node:
        return graph.call_method("__call__", (function, *values), named)

    lacking = graph.call_method("isdisjoint", (graph.call_method("keys", (keywords,)), (_OWN_STATE,)))
    call(expect, lacking, False, msg=why)
    call(warn, _CHECKPOINT)
    save = graph.call_function(getattr, (kind, method))
    whole = graph.call_function(operator.add, ((part,), arguments))
    graph.call_method("run", (call(later, target=save, args=whole, kwargs=keywords),))
    graph.output(None)
    return fx.GraphModule(nn.Module(), graph, class_name="RefuseSaving")
