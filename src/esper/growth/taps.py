"""Hooks of a host: what is seen of its passes, for seeds that read it and for clocks; and the tables of its hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from esper.errors import ExportError, SlotError
from esper.growth.positions import NO_HINTS, find_hints


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
    """A hook that does nothing."""


def require_untraced() -> None:
    """Refuse to be exported while seeds may come and go.

    Raises:
        ExportError: `torch.export`, `torch.onnx` or `torch.jit` is tracing.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise ExportError(
            "a growing model cannot be exported or traced, since its slots may change: export what model.finalize() "
            "returns"
        )


class Clock(Protocol):
    """Counts passes."""

    def count_forward(self, inputs: Tensor) -> None:
        """A pass forward begins."""
        ...

    def count_backward(self, outputs: Sequence[Tensor]) -> None:
        """It is over, and these can be differentiated; none: it is not known what can."""
        ...


class InputTap(nn.Module):
    """Forward pre-hook of the host that remembers the network's input, for seeds that read it.

    It is held from one host forward to the next; copies do not carry it.

    Args:
        place: Of the input among the host's arguments: an index, or the name of a keyword. Where no tensor is there,
            the input is the first tensor among them, positional ones first.
        names: Of the host's positional arguments, in order.
    """

    def __init__(self, place: int | str, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.place = place
        self.names = names
        self.given = NO_HINTS
        """Masks and caches of the forward pass now under way."""
        self._inputs: Tensor | None = None
        self.clocks: list[Clock] = []
        """Hear the network's input in every pass, but in those that are compiled."""

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        require_untraced()
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: argument for place, argument in places.items() if isinstance(argument, Tensor)}
        if tensors:
            self._inputs = tensors.get(self.place, next(iter(tensors.values())))
            if not torch.compiler.is_compiling():
                for clock in self.clocks:
                    clock.count(self._inputs)
        self.given = find_hints(self.names, arguments, keywords)

    @property
    def called(self) -> bool:
        """Whether there was a forward pass, since `forget` at least."""
        return self._inputs is not None

    def forget(self) -> None:
        """Be as if there had been no forward pass yet."""
        self._inputs = None

    @property
    def inputs(self) -> Tensor:
        """The input of the forward pass now under way.

        Raises:
            SlotError: there is none.
        """
        if self._inputs is None:
            raise SlotError(
                "a seed reads the network's input, but the host has not been called yet: call it as a whole"
            )
        return self._inputs

    def __getstate__(self) -> dict[str, Any]:
        # Part of an autograd graph it could be neither copied nor pickled; otherwise it would store a batch of data.
        return {**self.__dict__, "_inputs": None, "given": NO_HINTS, "clocks": []}


class OutputTap:
    """Forward hook of the host that shows clocks what the network returns, where a backward pass may come."""

    def __init__(self, tap: InputTap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not (self.tap.pass_counters and torch.is_grad_enabled()):
            return
        tensors = list(find_tensors(output))
        # A leaf, such as a parameter that is returned as well, outlives the pass.
        made = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for clock in self.tap.pass_counters if made or not tensors else ():
            clock.follow(made)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a network returned, in order: of mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, tuple | list):
        parts = cast("Sequence[Any]", value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from find_tensors(part)


class IncomparableError(Exception):
    """A value of which nobody knows what it is made of."""


def flatten(value: Any) -> list[Any]:
    """The tensors in what a network takes or returns, and what says how they are arranged there.

    Raises:
        IncomparableError: there is something else in it.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return [value]
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise IncomparableError("a tensor that is nested or sparse")
        return [value]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return [type(mapping), *mapping, *(leaf for part in mapping.values() for leaf in flatten(part))]
    if isinstance(value, tuple | list):
        items = cast("Sequence[Any]", value)
        return [type(items), len(items), *(leaf for item in items for leaf in flatten(item))]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(leaf for field in fields(value) for leaf in flatten(getattr(value, field.name)))]
    raise IncomparableError(f"a {type(value).__name__}")


def copy_tensors(leaves: list[Any]) -> list[Any]:
    """The same with tensors of its own."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def find_storages(leaves: list[Any]) -> set[int]:
    """Addresses of the memory that tensors among ``leaves`` have."""
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()}


def equals(leaves: list[Any], value: Any) -> bool:
    """Whether ``value`` was the same when it was flattened into ``leaves``."""
    try:
        return are_equal(leaves, flatten(value))
    except IncomparableError:
        return False


def are_equal(leaves: list[Any], others: list[Any]) -> bool:
    """Whether two flattened values are equal, not-a-numbers included."""
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def _is_equal(leaf: Any, other: Any) -> bool:
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
        return type(leaf) is type(other) and bool(leaf == other)
    if (leaf.shape, leaf.dtype, leaf.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(leaf, other) or bool(((leaf == other) | (leaf.isnan() & other.isnan())).all())
