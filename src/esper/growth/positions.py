"""Which positions of a host may learn of which others: of later ones, of padding, and of those in a cache.

Where examples of different lengths share a batch, a mask keeps padding out of what the host computes; and where a
language model generates, it may compute one token at a time and take the rest from a cache. Seeds see neither mask nor
cache. So what grows in such hosts must treat each position by itself. Both show in what modules are called with: in
their arguments' names, which are a convention, in Boolean tensors with an entry for each position, and in packed
sequences. Whether positions may learn of later ones shows in the outputs, once the last position is another one.

In eval mode torch's `TransformerEncoder` hands nested tensors to its layers when a padding mask is given. Seeds see
such a batch with zeros where an example has ended, and what they put there is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.errors import SlotError
from esper.growth.site import Site

_PADDING_WORDS = frozenset({"padding", "pad"})
_MASK_WORDS = frozenset({"mask", "masks"}) | _PADDING_WORDS
_LENGTH_WORDS = frozenset({"lengths", "lens"})
_CACHE_WORDS = frozenset({"past", "cache", "caches"})
_NO_POSITIONS = frozenset({"head", "position"})
"""Words of names that are about something else: ``head_mask``, ``cache_position``."""


class PositionHints(NamedTuple):
    """What of the arguments of a call tells positions apart."""

    masks: dict[str, Tensor]
    """Tensors that may be masks, by the names of their arguments."""
    caches: tuple[str, ...]
    """Names of the arguments that are a cache."""


NO_HINTS = PositionHints({}, ())


def list_argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's ``forward``, in order; none where they cannot be known."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def find_hints(names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> PositionHints:
    """What a call with these arguments gives; ``names`` are those of positional ones."""
    called = (*names, *[""] * (len(arguments) - len(names)))
    bound = [*zip(called, arguments, strict=False), *keywords.items()]
    masks = {
        name: value
        for name, value in bound
        if isinstance(value, Tensor) and (_is_mask(name) or value.dtype is torch.bool)
    }
    caches = tuple(
        name for name, value in bound if value is not None and not isinstance(value, bool) and _is_cache(name)
    )
    return PositionHints(masks, caches) if masks or caches else NO_HINTS


def drop_caches(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with None for each cache; ``names`` are those of positional arguments."""
    caches = find_hints(names, arguments, keywords).caches
    called = (*names, *[""] * (len(arguments) - len(names)))
    kept = tuple(None if name in caches else value for name, value in zip(called, arguments, strict=False))
    return kept, {name: None if name in caches else value for name, value in keywords.items()}


class CallWitness:
    """Sees what the modules of a host are called with, until `release`."""

    def __init__(self, host: nn.Module) -> None:
        self._seen: list[PositionHints] = []
        self._packed = False
        self._hooks = [
            module.register_forward_pre_hook(self._see, with_kwargs=True)
            for module in host.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # torch gives those no hooks
        ]

    def _see(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._packed |= any(isinstance(value, PackedSequence) for value in (*arguments, *keywords.values()))
        hints = find_hints(list_argument_names(module), arguments, keywords)
        if hints is not NO_HINTS:
            self._seen.append(hints)

    def release(self) -> None:
        """See no more calls."""
        for hook in self._hooks:
            hook.remove()

    def reason(self, batch: int, lengths: Collection[int]) -> str:
        """Why positions stay apart, as far as these calls tell; empty if they do not.

        Args:
            batch: How many examples the host was called with.
            lengths: Numbers of positions that features have.
        """
        for found in self._seen:
            for cache in found.caches:
                return f"a module of the model is given a cache, {cache!r}"
            for name, mask in found.masks.items():
                if _masks_examples(name, mask, batch, lengths):
                    return f"a module of the model is given a mask, {name!r}"
        return "a module of the model is given packed sequences" if self._packed else ""


def find_declared_reason(host: nn.Module, keywords: Collection[str], *, images: bool) -> str:
    """Why positions stay apart, as far as the host's signature, its embeddings and the names of its arguments tell.

    Args:
        host: Any module.
        keywords: Names of the arguments that it is called with.
        images: Whether it reads images: they are not padded, so a mask that it could take alone tells nothing.
    """
    for name in keywords if images else (*keywords, *list_argument_names(host)):
        if _is_mask(name) or _is_cache(name) or _LENGTH_WORDS & _words(name):
            return f"the model takes {name!r}"
    for module in host.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return f"an embedding has the padding index {module.padding_idx}"
    return ""


def explain_apart(site: Site) -> str:
    """What to add to the sentence that refuses a blueprint that mixes positions at ``site``; nothing where it may."""
    if not site.apart:
        return ""
    return (
        f", where positions must stay apart since {site.apart}: it would let padding leak into other positions, and "
        "find the past missing where that is cached (if no batch is padded and nothing is cached, attach with "
        "apart=False)"
    )


def refuse_to_mix(slot: str, blueprint: str, call: PositionHints, features: Tensor) -> None:
    """A seed that mixes positions is to see ``features [B, T, ...]`` of a host that was called like that.

    What a mask holds is read where that costs no break of a graph, thus not under `torch.compile` and `torch.export`.

    Raises:
        SlotError: some of the positions are padding, or others are in a cache.
    """
    if call.caches:
        cause = f"is called with a cache, {call.caches[0]!r}: call the model with use_cache=False or its like"
        raise SlotError(f"{_begin_refusal(blueprint, slot)} {cause}, or prune that seed")
    if torch.compiler.is_compiling():
        return
    if _holds_padding(call.masks.values(), features):
        raise SlotError(
            f"{_begin_refusal(blueprint, slot)} is called with a mask of padding: prune that seed, and attach with "
            "apart=True, so that only blueprints that keep positions apart are on offer"
        )


def _begin_refusal(blueprint: str, slot: str) -> str:
    return f"blueprint {blueprint!r} in slot {slot!r} mixes positions, but the model"


def _holds_padding(masks: Iterable[Tensor], features: Tensor) -> bool:
    """Whether ``features [B, T, ...]`` are of examples that differ in length, or a mask ``[B, T]`` of them says so.

    A mask may have axes of size one besides. One whose entries are all alike masks nothing, whatever they mean.
    """
    if features.is_nested:
        return len({len(example) for example in features.unbind()}) > 1
    batch, positions = features.shape[:2]
    of_positions = (mask for mask in masks if mask.shape[:1] == (batch,) and mask.numel() == batch * positions)
    return any(bool((mask != mask.flatten()[0]).any()) for mask in of_positions)


def _masks_examples(name: str, mask: Tensor, batch: int, lengths: Collection[int]) -> bool:
    """Whether it masks positions of each example, unlike one ``[T, T]`` that is about their order."""
    if mask.dim() < 2:
        return False
    if not _is_mask(name):
        return mask.shape[0] == batch and mask.shape[1] in lengths
    rows, columns = mask.shape[0], mask.shape[1]
    square = mask.dim() == 2 and rows == columns and not _PADDING_WORDS & _words(name)
    return rows % batch == 0 and not square


def _is_mask(name: str) -> bool:
    words = _words(name)
    return bool(words & _MASK_WORDS) and not words & _NO_POSITIONS


def _is_cache(name: str) -> bool:
    words = _words(name)
    return bool(words & _CACHE_WORDS) and not words & _NO_POSITIONS


def _words(name: str) -> frozenset[str]:
    return frozenset(name.lower().split("_"))


def is_causal(network: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Whether another last position of ``inputs [B, T, ...]`` leaves the outputs of all earlier ones as they were.

    Only of networks whose output has the same T positions along axis 1 can that be said; of others it is False, and so
    of inputs with a single position. It is True of a network that mixes no positions, and of one whose outputs do not
    change at all, perhaps because its last layer is still zero: either may be a language model, which nothing that
    grows may spoil.
    """
    if inputs.dim() < 2 or inputs.shape[1] < 2:
        return False
    before = find_output_tensor(network(inputs))
    if before is None or before.dim() != 3 or before.shape[1] != inputs.shape[1]:
        return False
    after = find_output_tensor(network(_change_last(inputs)))
    assert after is not None
    return torch.allclose(before[:, :-1], after[:, :-1])


def _change_last(inputs: Tensor) -> Tensor:
    """With another last position: an index that occurs elsewhere in the input if one does, or random numbers."""
    changed = inputs.clone()
    if inputs.is_floating_point():
        noise = torch.randn(inputs[:, -1].shape, generator=torch.Generator().manual_seed(0))
        changed[:, -1] = noise.to(inputs)
    else:
        last = inputs[:, -1]
        others = inputs[inputs != last.unsqueeze(1)]
        changed[:, -1] = others[0] if len(others) else (last == 0).to(inputs.dtype)
    return changed


def find_output_tensor(returned: Any) -> Tensor | None:
    """What a network returned, if it is a tensor, or the first tensor of a tuple or mapping that has axes."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        returned = tuple(cast("Mapping[str, Any]", returned).values())
    parts = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
    return next((part for part in parts if isinstance(part, Tensor) and part.dim() > 0), None)


def pad_nested(ragged: Tensor, tokens: int = 0) -> Tensor:
    """``[B, T, D]``, zeros after the end of each example; T is the longest one's length, at least ``tokens``."""
    lengths = [len(example) for example in ragged.unbind()]
    shape = (len(lengths), max(tokens, *lengths), ragged.size(-1))
    return cast("Tensor", torch.nested.to_padded_tensor(ragged, 0.0, shape))


def cut_to_lengths(features: Tensor, like: Tensor) -> Tensor:
    """``features [B, T, D]`` cut to the lengths of the examples of ``like``."""
    parts = zip(features, like.unbind(), strict=True)
    ragged: Tensor = torch.nested.as_nested_tensor([example[: len(other)] for example, other in parts])
    return ragged
