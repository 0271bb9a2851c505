"""Hooks by which a host grows, records its input and counts its passes; tensors in what a module returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from esper.errors import ExportError, SlotError
from esper.growth.positions import find_mask_or_cache


class GrowthHook(nn.Module):
    """A forward hook by which a host grows; copies of a part of the host do not have it."""


HookTables = list[MutableMapping[int, Any]]


def find_hook_tables(module: nn.Module) -> HookTables:
    """The tables of the module's forward hooks and forward pre-hooks; empty if it takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    # Torch gives public access to the tables only by handles of hooks in them.
    handles = [module.register_forward_hook(_do_nothing), module.register_forward_pre_hook(_do_nothing)]
    tables: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return tables


def list_named_modules(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """`torch.nn.Module.named_modules`, which has no type hints, as a list."""
    return list(cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=remove_duplicate)))


def list_hooks(module: nn.Module) -> list[Any]:
    """The module's forward hooks and forward pre-hooks."""
    return [hook for table in find_hook_tables(module) for hook in table.values()]


def _do_nothing(*_: Any) -> None:
    """A hook that does nothing."""


GROWING_ADVICE = (
    "a growing model cannot be exported or traced, since its slots may change: export what model.finalize() returns"
)


def require_untraced() -> None:
    """Reject exporting or tracing a growing model."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise ExportError(GROWING_ADVICE)


def require_unsharded(model: nn.Module) -> None:
    """Reject a model of whose parameters this process holds a part."""
    # Both modules are slow to import, and loaded wherever there is such a model.
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    wrapped = fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in model.modules())
    if wrapped or (tensor is not None and any(isinstance(part, tensor.DTensor) for part in model.parameters())):
        raise SlotError(
            "this process holds only a part of the model's parameters (FSDP2, tensor parallelism), and growth needs "
            "whole ones: use DistributedDataParallel while the model grows, or shard what model.finalize() returns"
        )


def find_features(output: Any) -> Any:
    """The features in a submodule's output: the whole output, or the first element of a plain tuple."""
    return cast("tuple[Any, ...]", output)[0] if holds_features(output) else output


def replace_features(output: Any, features: Tensor) -> Any:
    """A submodule's output with its features replaced."""
    return (features, *output[1:]) if holds_features(output) else features


def holds_features(output: Any) -> bool:
    """Whether the features are the first element of an output, as for recurrent layers, and not the output itself.

    Other types derived from tuples, such as packed sequences, do not count.
    """
    return type(output) is tuple and isinstance(next(iter(cast("tuple[Any, ...]", output)), None), Tensor)


class PassCounter(Protocol):
    """Counts forward and backward passes of a model."""

    def count_forward(self, inputs: Tensor) -> None:
        """Called at the start of a forward pass with the network's input."""
        ...

    def count_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after the forward pass with its outputs that have a gradient function; empty if unknown."""
        ...


class InputHook(nn.Module):
    """Forward pre-hook of the host that keeps the network's input until the next pass, for seeds that need it.

    Copies of the model do not have the input.

    Args:
        place: Index or keyword of the input among the host's arguments. If there is no tensor, the input is the first
            tensor among them, positional ones first.
        names: Names of the host's positional arguments, in order.
    """

    def __init__(self, place: int | str, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.place = place
        self.names = names
        self.mask_or_cache = ""
        """Name of a mask or cache among the arguments of the last forward pass; empty if there was none."""
        self.inputs: Tensor | None = None
        """The input of the last forward pass; None before any."""
        self.pass_counters: list[PassCounter] = []
        """Counters that are called in every forward pass."""

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        require_untraced()
        # Find the input as in the example input, or as the first tensor.
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: argument for place, argument in places.items() if isinstance(argument, Tensor)}
        inputs = tensors.get(self.place, next(iter(tensors.values()))) if tensors else None
        batch = 0 if inputs is None or inputs.dim() == 0 else len(inputs)
        self.mask_or_cache = find_mask_or_cache(self.names, arguments, keywords, batch)
        if inputs is not None:
            self.inputs = inputs
            for counter in self.pass_counters:
                counter.count_forward(inputs)

    def get_inputs(self) -> Tensor:
        """The input of the last forward pass."""
        if self.inputs is None:
            raise SlotError("a seed needs the network's input, but the host has not been called: call the whole host")
        return self.inputs

    def __getstate__(self) -> dict[str, Any]:
        # An input in an autograd graph can be neither copied nor pickled, and files should not contain data.
        return {**self.__dict__, "inputs": None, "mask_or_cache": "", "pass_counters": []}


class SourceHook(GrowthHook):
    """Forward pre-hook of a layer that computes hidden units; keeps its input until the last layer has been called.

    Copies of the model do not have the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: Tensor | None = None
        """The input of the last call; None once the next layer has been called."""

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.inputs = next(iter((*arguments, *keywords.values())), None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": None}


class OutputHook:
    """Forward hook of the host that passes the outputs to pass counters, if a backward pass may follow."""

    def __init__(self, input_hook: InputHook) -> None:
        self.input_hook = input_hook

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not (self.input_hook.pass_counters and torch.is_grad_enabled()):
            return
        tensors = list(find_tensors(output))
        # A leaf, such as a returned parameter, outlives the pass.
        outputs = [tensor for tensor in tensors if tensor.grad_fn is not None]
        if outputs or not tensors:
            for counter in self.input_hook.pass_counters:
                counter.count_backward(outputs)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a network's output, in order, within mappings, lists, tuples and dataclasses."""
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


def find_output_tensor(returned: Any) -> Tensor | None:
    """The first tensor with axes in the output of a network; None if there is none."""
    return next((part for part in find_tensors(returned) if part.dim() > 0), None)


def find_attached(model: nn.Module) -> str | None:
    """The name of a submodule with a slot after it; None if there is none."""
    for name, part in list_named_modules(model):
        if any(isinstance(hook, GrowthHook) and not isinstance(hook, SourceHook) for hook in list_hooks(part)):
            return name
    return None
