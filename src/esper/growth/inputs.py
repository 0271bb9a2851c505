"""Inputs of hosts: the example input, and masks, lengths and caches among the arguments of a call.

Seeds get no masks of padding and no caches of past positions. So wherever a host gets one, a seed must treat each
position separately. They are found by the names of arguments; Boolean tensors and packed sequences count, too.
"""

import inspect
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Annotated, Any, NoReturn, cast

import torch
from pydantic import PlainValidator
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.config.arguments import Advice
from esper.errors import SlotError

# The example input


def _read_arguments(value: Any) -> Any:
    """A tensor, a tuple, or a mapping from names."""
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    names = list(cast("Mapping[Any, Any]", value)) if isinstance(value, Mapping) else [None]
    if isinstance(value, Tensor | tuple) or all(isinstance(name, str) for name in names):
        return cast("object", value)
    raise ValueError("no arguments")


def _read_module(value: Any) -> Any:
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        raise ValueError("no module")
    return value


Arguments = Annotated[
    Tensor | tuple[Any, ...] | Mapping[str, Any],
    PlainValidator(_read_arguments),
    Advice("give the model's arguments: a tensor, a tuple of arguments, or a dictionary of keyword arguments"),
]
"""Arguments of a host: a single tensor, positional arguments, or keyword arguments."""
PlainModule = Annotated[
    nn.Module,
    PlainValidator(_read_module),
    Advice("give an nn.Module, and of scripted or traced ones (torch.jit) the module that they were made of"),
]
FEWEST_EXAMPLES = 2
"""Smallest number of examples; with only one, the batch axis looks like any other axis of size 1."""


class ExampleInput:
    """The example input of a host; pickles do not contain it, and copies share it."""

    def __init__(self, arguments: Arguments | None = None) -> None:
        self.arguments = arguments

    def __deepcopy__(self, _: object) -> "ExampleInput":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ExampleInput, ()


def call_host(host: nn.Module, arguments: Arguments) -> Any:
    """Call ``host`` with a single argument, positional arguments or keyword arguments."""
    if isinstance(arguments, Tensor):
        return host(arguments)
    return host(**arguments) if isinstance(arguments, Mapping) else host(*arguments)


def map_arguments(arguments: Arguments, change: Callable[[Any], Any]) -> Arguments:
    """The arguments, each of them changed."""
    if isinstance(arguments, Tensor):
        return cast("Tensor", change(arguments))
    if isinstance(arguments, Mapping):
        return {name: change(value) for name, value in arguments.items()}
    return tuple(map(change, arguments))


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

    return map_arguments(arguments, move_value)


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


def describe_failure(host: nn.Module, example_input: Arguments, error: Exception) -> str:
    """Which arguments the host failed on, why, and what to give instead."""
    described: list[str] = []
    for place, value in _list_by_place(example_input).items():
        tensor = isinstance(value, Tensor)
        text = f"{tuple(value.shape)} {value.dtype} on {value.device}" if tensor else type(value).__name__
        described.append(text if isinstance(place, int) else f"{place}: {text}")
    like = next((f" ({values.dtype} on {values.device})" for values in host.parameters()), "")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"{type(host).__name__} cannot run on the example input [{', '.join(described)}]: {reason}; give "
        f"{FEWEST_EXAMPLES} examples or more as your training loop passes them to the model (a tensor, a tuple or a "
        f"dictionary of arguments, without labels), with the device and type that its parameters{like} need"
    )


# Masks, lengths and caches

_CACHE_WORDS = frozenset({"past", "cache", "caches"})
_WORDS = frozenset({"mask", "masks", "padding", "pad", "lengths", "lens"}) | _CACHE_WORDS
_OTHER_WORDS = frozenset({"head", "position"})
"""Words in names that are not about examples of different lengths, such as ``head_mask`` and ``cache_position``."""
_ORDER_MASKS = frozenset({"attn_mask", "src_mask", "tgt_mask"})
"""Names that torch gives to masks ``[T, T]``, which are the same for all examples."""
NESTED_ADVICE = "build torch's TransformerEncoder with enable_nested_tensor=False, which keeps padding in the tensor"
"""Advice in errors about nested tensors, which slots do not take."""


def list_argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's ``forward``, in order; empty if it has no signature."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def _name_arguments(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """All arguments of a call with their names, which are empty for those beyond ``names``, as of ``*args``."""
    return [*zip_longest(names[: len(arguments)], arguments, fillvalue=""), *keywords.items()]


def is_mask_or_cache(name: str, words: frozenset[str] = _WORDS) -> bool:
    """Whether the name of an argument says that it masks padding, gives lengths or holds a cache."""
    parts = set(name.lower().split("_"))
    return not parts.isdisjoint(words) and parts.isdisjoint(_OTHER_WORDS)


def find_mask_or_cache(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any], batch: int
) -> str:
    """Name of a mask of padding, lengths or a cache among the arguments of a call; empty if there is none.

    ``names`` are those of the positional arguments, and ``batch`` is the number of examples.
    """
    for name, value in _name_arguments(names, arguments, keywords):
        nested = isinstance(value, Tensor) and value.is_nested
        tensor = value if isinstance(value, Tensor) and not nested else None
        named = is_mask_or_cache(name) and value is not None and not (isinstance(value, int) and not value)
        typed = isinstance(value, PackedSequence) or nested or (tensor is not None and tensor.dtype is torch.bool)
        # A square mask hides later positions from all examples, unless it can be one [B, T] of their padding.
        square = tensor is not None and tensor.dim() == 2 and len(tensor) == tensor.shape[1]
        fits_batch = tensor is not None and tensor.shape[:1] == (batch,)
        of_order = square and "pad" not in name.lower() and (name in _ORDER_MASKS or not fits_batch)
        if (named or typed) and not of_order:
            return name or type(value).__name__
    return ""


def drop_caches(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of ``module`` with None for each cache."""
    kept = [
        None if is_mask_or_cache(name, _CACHE_WORDS) and not isinstance(value, bool) else value
        for name, value in _name_arguments(list_argument_names(module), arguments, keywords)
    ]
    return tuple(kept[: len(arguments)]), dict(zip(keywords, kept[len(arguments) :], strict=True))


def refuse_to_mix(slot: str, blueprint: str, found: str) -> NoReturn:
    """Reject a blueprint that mixes positions, where the model is called with the argument ``found``."""
    raise SlotError(
        f"blueprint {blueprint!r} in slot {slot!r} mixes positions, but would get no mask, lengths or cache, and the "
        f"model uses {found!r}: call it without that (use_cache=False for a cache), or choose a blueprint that treats "
        "each position separately, such as 'mlp' or 'lowrank'"
    )
