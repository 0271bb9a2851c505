"""Whether seeds may mix positions of tokens: masks, lengths and caches in calls of a host.

Seeds get no masks of padding and no caches of past positions. So wherever a host gets one, a seed must treat each
position separately. Masks, lengths and caches are found by the names of arguments; Boolean tensors and packed sequences
count, too. `esper.growth.probe` finds out whether outputs depend on later positions.

In evaluation mode torch's `TransformerEncoder` calls its layers with nested tensors when a padding mask is given. Seeds
get such a batch padded with zeros, and their outputs at padding are dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.errors import SlotError

_CACHE_WORDS = frozenset({"past", "cache", "caches"})
_WORDS = frozenset({"mask", "masks", "padding", "pad", "lengths", "lens"}) | _CACHE_WORDS
_OTHER_WORDS = frozenset({"head", "position"})
"""Words in names that are not about examples of different lengths, such as ``head_mask`` and ``cache_position``."""
_ORDER_MASKS = frozenset({"attn_mask", "src_mask", "tgt_mask"})
"""Names that torch gives to masks ``[T, T]``, which are the same for all examples."""


def list_argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's ``forward``, in order; empty if it has no signature."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def find_mask_or_cache(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any], batch: int
) -> str:
    """Name of an argument that masks padding, gives lengths or holds a cache; empty if there is none.

    A mask ``[T, T]`` of later positions does not count.

    Args:
        names: Names of the positional arguments; those beyond them, as of ``*args``, have none.
        arguments: Positional arguments of a call.
        keywords: Its other arguments.
        batch: Number of examples.
    """
    for name, value in _name_arguments(names, arguments, keywords):
        named = is_mask_or_cache(name) and value is not None and not (isinstance(value, int) and not value)
        typed = isinstance(value, PackedSequence) or (
            isinstance(value, Tensor) and (value.is_nested or value.dtype is torch.bool)
        )
        if (named or typed) and not _hides_later_positions(name, value, batch):
            return name or type(value).__name__
    return ""


def _hides_later_positions(name: str, value: Any, batch: int) -> bool:
    """Whether an argument is a mask ``[T, T]`` for all examples, and cannot be one ``[B, T]`` of their padding."""
    if not isinstance(value, Tensor) or value.is_nested or value.dim() != 2 or len(value) != value.shape[1]:
        return False
    return "pad" not in name.lower() and (len(value) != batch or name in _ORDER_MASKS)


def is_mask_or_cache(name: str) -> bool:
    """Whether the name of an argument says that it masks padding, gives lengths or holds a cache."""
    return _has_word(name, _WORDS)


def list_caches(names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[str]:
    """Names of the arguments of a call that are caches; ``names`` are the names of positional arguments."""
    return [
        name
        for name, value in _name_arguments(names, arguments, keywords)
        if value is not None and not isinstance(value, bool) and _has_word(name, _CACHE_WORDS)
    ]


def drop_caches(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with None for each cache; ``names`` are the names of positional arguments."""
    caches = list_caches(names, arguments, keywords)
    kept = [None if name in caches else value for name, value in _name_arguments(names, arguments, keywords)]
    return tuple(kept[: len(arguments)]), dict(zip(keywords, kept[len(arguments) :], strict=True))


def _name_arguments(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """All arguments of a call with their names, which are empty beyond ``names``."""
    return [*zip_longest(names[: len(arguments)], arguments, fillvalue=""), *keywords.items()]


def _has_word(name: str, words: frozenset[str]) -> bool:
    parts = set(name.lower().split("_"))
    return not parts.isdisjoint(words) and parts.isdisjoint(_OTHER_WORDS)


class CallRecorder:
    """Finds masks, lengths and caches in the calls of a host's modules, until `remove`."""

    def __init__(self, host: nn.Module, batch: int) -> None:
        padded = (part for part in host.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None)
        self.found = "padding_idx" if any(padded) else ""
        """Name of the first argument that was found, or of that of an embedding; empty if there is none."""
        self._batch = batch
        self._hooks = [
            module.register_forward_pre_hook(self._record, with_kwargs=True)
            for module in host.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def _record(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.found and not torch.compiler.is_compiling():  # within a submodule that the user compiled
            self.found = find_mask_or_cache(list_argument_names(module), arguments, keywords, self._batch)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def refuse_to_mix(slot: str, blueprint: str, found: str) -> NoReturn:
    """Reject a blueprint that mixes positions, where the model is called with the argument ``found``."""
    raise SlotError(
        f"blueprint {blueprint!r} in slot {slot!r} mixes positions, but would get no mask, lengths or cache, and the "
        f"model uses {found!r}: call it without that (use_cache=False for a cache), or choose a blueprint that treats "
        "each position separately, such as 'mlp' or 'lowrank'"
    )


def pad_nested(ragged: Tensor, tokens: int = 0) -> Tensor:
    """Pad a nested tensor to ``[B, T, D]`` with zeros; T is the greatest length, at least ``tokens``."""
    lengths = [len(example) for example in ragged.unbind()]
    shape = (len(lengths), max(tokens, *lengths), ragged.size(-1))
    return cast("Tensor", torch.nested.to_padded_tensor(ragged, 0.0, shape))


def cut_to_lengths(features: Tensor, like: Tensor) -> Tensor:
    """A nested tensor of ``features [B, T, D]``, with the lengths of ``like``."""
    parts = zip(features, like.unbind(), strict=True)
    ragged: Tensor = torch.nested.as_nested_tensor([example[: len(other)] for example, other in parts])
    return ragged
