"""Arguments of hosts: what users give as an example input, and how a host is called with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import torch
from pydantic import PlainValidator
from torch import Tensor, nn

from esper.config.arguments import Advice
from esper.errors import SlotError


def _read_arguments(value: Any) -> Any:
    """A tensor, a tuple, or a mapping from names."""
    if isinstance(value, Tensor | tuple):
        return cast(object, value)
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in cast("Mapping[Any, Any]", value)):
        raise ValueError("no arguments")
    return cast(object, value)


def _read_module(value: Any) -> Any:
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        raise ValueError("no module")
    return value


Arguments = Annotated[
    Tensor | tuple[Any, ...] | Mapping[str, Any],
    PlainValidator(_read_arguments),
    Advice("give the model's arguments: a tensor, a tuple of arguments, or a dictionary of keyword arguments"),
]
"""Arguments of a host: a single tensor, a tuple of positional arguments, or a dictionary of keyword arguments."""
PlainModule = Annotated[
    nn.Module,
    PlainValidator(_read_module),
    Advice("give an nn.Module, and of scripted or traced ones (torch.jit) the module that they were made of"),
]
"""Any module except those of torch.jit."""
FEWEST_EXAMPLES = 2
"""Smallest number of examples; with only one, the batch axis looks like any other axis of size 1."""


class ExampleInput:
    """The example input of a host; pickles do not contain it, and copies share it.

    Args:
        arguments: The host's arguments; None after pickling.
    """

    def __init__(self, arguments: Arguments | None = None) -> None:
        self.arguments = arguments

    def __deepcopy__(self, _: object) -> ExampleInput:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ExampleInput, ()


def call_host(host: nn.Module, arguments: Arguments) -> Any:
    """Call ``host`` with a single argument, positional arguments or keyword arguments."""
    if isinstance(arguments, Tensor):
        return host(arguments)
    return host(**arguments) if isinstance(arguments, Mapping) else host(*arguments)


def fit_example(host: nn.Module, arguments: Arguments, like: Tensor) -> Arguments:
    """Move the arguments to the device of ``host``, and convert floating-point tensors if no parameter has their dtype.

    Device and dtype are those of the first parameter with the example's dtype, or else of ``like``.
    """
    # The host may have been moved or converted since it was probed.
    dtype, types = first_tensor(arguments).dtype, {values.dtype for values in host.parameters()}
    like = next((values for values in host.parameters() if values.dtype == dtype), like)

    def move_value(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        converts = value.is_floating_point() and value.dtype not in types
        return value.to(like.device, like.dtype if converts else value.dtype)

    if isinstance(arguments, Tensor):
        return cast("Tensor", move_value(arguments))
    if isinstance(arguments, Mapping):
        return {name: move_value(value) for name, value in arguments.items()}
    return tuple(map(move_value, arguments))


def _list_by_place(arguments: Arguments) -> dict[int | str, Any]:
    """All arguments by index or keyword."""
    if isinstance(arguments, Tensor):
        return {0: arguments}
    return dict(arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments))


def find_input_place(arguments: Arguments) -> int | str:
    """Index or keyword of the network's input, which is the first tensor among the arguments."""
    for place, argument in _list_by_place(arguments).items():
        if isinstance(argument, Tensor):
            return place
    raise SlotError("the example input contains no tensor: give the model's arguments")


def first_tensor(arguments: Arguments) -> Tensor:
    """The network's input, which is the first tensor among the arguments."""
    return _list_by_place(arguments)[find_input_place(arguments)]


def replace_input(arguments: Arguments, tensor: Tensor) -> Arguments:
    """The arguments with another first tensor, at the same index or keyword."""
    if isinstance(arguments, Tensor):
        return tensor
    first = first_tensor(arguments)
    replaced = {place: tensor if value is first else value for place, value in _list_by_place(arguments).items()}
    return cast("Arguments", replaced) if isinstance(arguments, Mapping) else tuple(replaced.values())


def describe_failure(host: nn.Module, example_input: Arguments, error: Exception) -> str:
    """Which arguments the host failed on, why, and what to give instead."""

    def describe(value: Any) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"

    arguments = ", ".join(
        describe(value) if isinstance(place, int) else f"{place}: {describe(value)}"
        for place, value in _list_by_place(example_input).items()
    )
    like = next((f" ({values.dtype} on {values.device})" for values in host.parameters()), "")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"{type(host).__name__} cannot run on the example input [{arguments}]: {reason}; give {FEWEST_EXAMPLES} "
        "examples or more as your training loop passes them to the model (a tensor, a tuple of arguments or a "
        f"dictionary of keyword arguments, without labels), with the device and type that its parameters{like} need"
    )
