"""Whether seeds may mix positions of a host's features: later ones, padding, and positions in a cache.

If examples of different lengths share a batch, a mask keeps padding out of the host's computation. A language model
that generates may compute one token at a time and take the rest from a cache. Seeds get neither mask nor cache, so in
such hosts they must treat each position separately. Masks and caches are detected from the arguments of modules: by
conventional names, by Boolean tensors with an entry for each position, and by packed sequences. Whether positions
depend on later ones is detected from the outputs, by changing the last position.

In evaluation mode torch's `TransformerEncoder` calls its layers with nested tensors when a padding mask is given. Seeds
get such a batch padded with zeros, and their outputs at padding are dropped.
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
"""Words in the names of arguments that are not about positions, such as ``head_mask`` and ``cache_position``."""


class PositionHints(NamedTuple):
    """Masks and caches among the arguments of a call."""

    masks: dict[str, Tensor]
    """Tensors that may be masks, by the names of their arguments."""
    caches: tuple[str, ...]
    """Names of the arguments that are caches."""


NO_HINTS = PositionHints({}, ())


def list_argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's ``forward``, in order; empty if it has no signature."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


def find_hints(names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> PositionHints:
    """Masks and caches among the arguments of a call; ``names`` are the names of positional arguments."""
    # Arguments beyond the names, as of ``*args``, have none.
    padded_names = (*names, *[""] * (len(arguments) - len(names)))
    bound = [*zip(padded_names, arguments, strict=False), *keywords.items()]
    # Masks are found by name or as Boolean tensors, caches only by name.
    masks = {
        name: value
        for name, value in bound
        if isinstance(value, Tensor) and (_has_word(name, _MASK_WORDS) or value.dtype is torch.bool)
    }
    caches = tuple(
        name
        for name, value in bound
        if value is not None and not isinstance(value, bool) and _has_word(name, _CACHE_WORDS)
    )
    return PositionHints(masks, caches) if masks or caches else NO_HINTS


def drop_caches(
    names: tuple[str, ...], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with None for each cache; ``names`` are the names of positional arguments."""
    caches = find_hints(names, arguments, keywords).caches
    padded_names = (*names, *[""] * (len(arguments) - len(names)))
    positional = tuple(None if name in caches else value for name, value in zip(padded_names, arguments, strict=False))
    return positional, {name: None if name in caches else value for name, value in keywords.items()}


class CallRecorder:
    """Records masks, caches and packed sequences in the calls of a host's modules, until `remove`."""

    def __init__(self, host: nn.Module) -> None:
        self._hints: list[PositionHints] = []
        self._packed = False
        self._hooks = [
            module.register_forward_pre_hook(self._record, with_kwargs=True)
            for module in host.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
        ]

    def _record(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # within a submodule that the user compiled
            return
        self._packed |= any(isinstance(value, PackedSequence) for value in (*arguments, *keywords.values()))
        hints = find_hints(list_argument_names(module), arguments, keywords)
        if hints is not NO_HINTS:
            self._hints.append(hints)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def find_reason(self, batch: int, lengths: Collection[int]) -> str:
        """A reason in the recorded calls why positions must be independent; empty if there is none.

        Args:
            batch: Number of examples in the call of the host.
            lengths: Numbers of positions of features.
        """
        for hints in self._hints:
            for cache in hints.caches:
                return f"a module of the model is given a cache, {cache!r}"
            for name, mask in hints.masks.items():
                if _masks_examples(name, mask, batch, lengths):
                    return f"a module of the model is given a mask, {name!r}"
        return "a module of the model is given packed sequences" if self._packed else ""


def find_declared_reason(host: nn.Module, keywords: Collection[str], *, images: bool) -> str:
    """A reason in a host's signature or embeddings why positions must be independent; empty if there is none.

    Args:
        host: Any module.
        keywords: Names of the keyword arguments of its call.
        images: Whether its inputs are images, which are not padded, so that the signature is ignored.
    """
    # Names of arguments that the host could be called with.
    for name in keywords if images else (*keywords, *list_argument_names(host)):
        if (
            _has_word(name, _MASK_WORDS)
            or _has_word(name, _CACHE_WORDS)
            or _LENGTH_WORDS & set(name.lower().split("_"))
        ):
            return f"the model takes {name!r}"
    # Embeddings that reserve an index for padding.
    for module in host.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return f"an embedding has the padding index {module.padding_idx}"
    return ""


def explain_apart(site: Site) -> str:
    """A clause for error messages that explains why positions must not be mixed at ``site``; empty if they may be."""
    if not site.apart:
        return ""
    return (
        f", where positions must stay apart since {site.apart}: it would let padding leak into other positions, and "
        "find the past missing where that is cached (if no batch is padded and nothing is cached, attach with "
        "apart=False)"
    )


def refuse_to_mix(slot: str, blueprint: str, call: PositionHints, features: Tensor) -> None:
    """Reject a pass in which a seed that mixes positions would mix padding, or miss positions in a cache.

    Values of masks are not read under `torch.compile` and `torch.export`, where that would break the graph.

    Args:
        slot: Name of the seed's slot.
        blueprint: Name of the seed's blueprint.
        call: Masks and caches in the call of the host.
        features: ``[B, T, ...]``.

    Raises:
        SlotError: some of the positions are padding, or others are in a cache.
    """
    problem = ""
    if call.caches:
        problem = (
            f"is called with a cache, {call.caches[0]!r}: call the model with use_cache=False or its like, or prune "
            "that seed"
        )
    elif not torch.compiler.is_compiling() and _holds_padding(call.masks.values(), features):
        problem = (
            "is called with a mask of padding: prune that seed, and attach with apart=True, so that only blueprints "
            "that keep positions apart are on offer"
        )
    if problem:
        raise SlotError(f"blueprint {blueprint!r} in slot {slot!r} mixes positions, but the model {problem}")


def _holds_padding(masks: Iterable[Tensor], features: Tensor) -> bool:
    """Whether the examples of ``features [B, T, ...]`` differ in length, by nesting or by a mask ``[B, T]``.

    A mask may have additional axes of size one. If all its entries are equal, it masks nothing.
    """
    if features.is_nested:
        return len({len(example) for example in features.unbind()}) > 1
    # Reading values costs a synchronisation with the device, so only masks of the right size are read.
    batch, positions = features.shape[:2]
    of_positions = (mask for mask in masks if mask.shape[:1] == (batch,) and mask.numel() == batch * positions)
    return any(bool((mask != mask.flatten()[0]).any()) for mask in of_positions)


def _masks_examples(name: str, mask: Tensor, batch: int, lengths: Collection[int]) -> bool:
    """Whether a mask differs between examples, unlike a causal mask ``[T, T]``."""
    if mask.dim() < 2:
        return False
    if not _has_word(name, _MASK_WORDS):
        return mask.shape[0] == batch and mask.shape[1] in lengths
    # A square mask without "padding" in its name is about the order of positions, the same for all examples.
    rows, columns = mask.shape[0], mask.shape[1]
    square = mask.dim() == 2 and rows == columns and not _has_word(name, _PADDING_WORDS)
    return rows % batch == 0 and not square


def _has_word(name: str, words: Collection[str]) -> bool:
    """Whether an argument's name contains one of the ``words`` and is about positions."""
    parts = set(name.lower().split("_"))
    return not parts.isdisjoint(words) and parts.isdisjoint(_NO_POSITIONS)


def is_causal(network: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Whether the outputs at all earlier positions stay equal when the last position of ``inputs [B, T, ...]`` changes.

    False if the output does not have the same T positions along axis 1, or if T is 1. Also True for a network that
    mixes no positions, and for one whose outputs do not change at all, perhaps because its last layer is still zero,
    since both may be language models.
    """
    if inputs.dim() < 2 or inputs.shape[1] < 2:
        return False
    # Compare the outputs at earlier positions before and after the last position changes.
    before = find_output_tensor(network(inputs))
    if before is None or before.dim() != 3 or before.shape[1] != inputs.shape[1]:
        return False
    last, changed = inputs[:, -1], inputs.clone()
    if inputs.is_floating_point():
        changed[:, -1] = torch.randn(last.shape, generator=torch.Generator().manual_seed(0)).to(inputs)
    else:  # an index that occurs elsewhere, if any: others may be invalid
        candidates = inputs[inputs != last.unsqueeze(1)]
        changed[:, -1] = candidates[0] if len(candidates) else (last == 0).to(inputs.dtype)
    after = find_output_tensor(network(changed))
    assert after is not None
    return torch.allclose(before[:, :-1], after[:, :-1])


def find_output_tensor(returned: Any) -> Tensor | None:
    """The output of a network, if it is a tensor, or the first tensor with axes in a tuple or mapping."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        returned = tuple(cast("Mapping[str, Any]", returned).values())
    parts = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
    return next((part for part in parts if isinstance(part, Tensor) and part.dim() > 0), None)


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
