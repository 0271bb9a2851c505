"""Put growth slots on a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import PlainValidator
from torch import nn

from esper.config.arguments import Advice, check_arguments
from esper.errors import SlotError, did_you_mean
from esper.growth.blueprints.registry import get
from esper.growth.frozen import WHOLE
from esper.growth.model import GrowingModel
from esper.growth.probe import Arguments, PlainModule

PATTERN = "re:"
"""Begins a key of `Places` that is a regular expression."""
AUTO = "auto"
"""Instead of blueprints: all that fit."""


def _list_places(value: Any) -> Any:
    """Names as a list, or by name the blueprints on offer."""
    if isinstance(value, Mapping):
        offers = cast("Mapping[Any, Any]", value)
        if not all(isinstance(name, str) for name in offers):
            raise ValueError("no names")
        return {name: given if isinstance(given, str) else _list_names(given) for name, given in offers.items()}
    return _list_names(value)


def _list_names(value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError("no names")
    names = list(cast("Iterable[Any]", value))
    if not all(isinstance(name, str) for name in names):
        raise ValueError("no names")
    return names


Places = Annotated[
    Sequence[str] | Mapping[str, Sequence[str] | str],
    PlainValidator(_list_places),
    Advice(
        "give a list of submodules' names, such as ['layer2'], or a mapping from names to a list of blueprints or "
        "'auto'"
    ),
]
"""Names of submodules, or ``re:`` and a regular expression; as keys with the blueprints on offer there."""


def _read_frozen(value: Any) -> Any:
    """True, False, or names."""
    if isinstance(value, Mapping):
        raise ValueError("no names")
    return bool(value) if isinstance(value, bool) else _list_names(value)


FrozenParts = Annotated[
    bool | Sequence[str],
    PlainValidator(_read_frozen),
    Advice("give True, False, or a list of submodules' names or patterns, such as ['encoder']"),
]


@check_arguments(SlotError)
def attach(
    model: PlainModule,
    slots: Places,
    example_input: Arguments,
    *,
    causal: bool | None = None,
    apart: bool | None = None,
    freeze_host: FrozenParts = False,
) -> GrowingModel:
    """Give ``model`` growth slots behind some of its submodules.

    ```python
    growing = attach(net, {"layer2": ["conv3x3", "squeeze_excite"], r"re:blocks\\.\\d+": "auto"}, images[:2])
    ```

    The model itself stays as it is, with its own state-dict keys; a slot is a forward hook, and dormant ones change
    nothing. Attach before `torch.compile`: hooks that come later are ignored in silence.

    Args:
        model: Any module.
        slots: Names of submodules, or a mapping from names to blueprints' names or ``"auto"``. A key that begins with
            ``re:`` is a regular expression that stands for all submodules whose whole name it matches.
        example_input: What the model takes, two examples or more: a tensor, a tuple of positional arguments, or a
            dictionary of keyword arguments. A forward pass with it finds out what features the slots see.
        causal: Whether tokens must not learn of later ones, as in a language model; None: that shows in the outputs.
        apart: Whether no position of tokens or sequences may learn of any other, as where the model masks padding or
            caches the past, of which seeds know nothing; None: that shows in what modules are called with. False puts
            what mixes positions on offer all the same: for models that never meet padding and never use a cache.
        freeze_host: Whether the host stays as it is, to the bit, and only what grows learns: its parameters require no
            gradient, and it stays in evaluation mode, without dropout or new statistics, whatever mode the model is
            in. Names or patterns, as in ``slots``, freeze these submodules and what is in them.

    Raises:
        SlotError: an argument is of another kind, such as a string as ``slots``; a name or pattern matches nothing, two
            of them the same submodule; a submodule is shared, is never called or more than once, or yields no features
            that a slot can use; a blueprint does not serve a site.
        UnknownBlueprintError: nobody registered a blueprint of that name.
    """
    if isinstance(slots, Mapping):
        offers = {place: _list_blueprints(place, given) for place, given in slots.items()}
    else:
        offers = dict.fromkeys(slots)
    frozen = _resolve_frozen(model, freeze_host)
    return GrowingModel(model, _resolve_names(model, offers), example_input, causal=causal, apart=apart, frozen=frozen)


def _resolve_frozen(model: nn.Module, freeze_host: bool | Sequence[str]) -> list[str]:
    """Names of the submodules to freeze."""
    if isinstance(freeze_host, bool):
        return [WHOLE] if freeze_host else []
    names = [name for place in freeze_host for name in _match_names(model, place)]
    module_names = {
        name for name, _ in cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    }
    for name in names:
        if name not in module_names or not name:
            raise SlotError(
                f"freeze_host: the host has no submodule {name!r}{did_you_mean(name, module_names) or ''}; "
                "print(model) shows the names, and freeze_host=True freezes all"
            )
    return list(dict.fromkeys(names))


def _list_blueprints(place: str, names: Sequence[str] | str) -> list[str] | None:
    if names == AUTO:
        return None
    if isinstance(names, str):
        raise SlotError(f"the blueprints of slot {place!r} are {names!r}: give a list of names, or 'auto'")
    return [get(name).name for name in names]


def _resolve_names(model: nn.Module, offers: Mapping[str, Sequence[str] | None]) -> dict[str, Sequence[str] | None]:
    """By name: patterns replaced by the names that they match."""
    if not offers:
        raise SlotError("no slots: name the submodules behind which the model may grow")
    blueprints_of: dict[str, Sequence[str] | None] = {}
    for place, blueprints in offers.items():
        for name in _match_names(model, place):
            if name in blueprints_of:
                raise SlotError(f"{place!r} matches submodule {name!r}, which an earlier slot has already")
            blueprints_of[name] = blueprints
    return blueprints_of


def _match_names(model: nn.Module, place: str) -> list[str]:
    if not place.startswith(PATTERN):
        return [place]
    try:
        pattern = re.compile(place.removeprefix(PATTERN))
    except re.error as error:
        raise SlotError(f"slot {place!r} is no regular expression: {error}") from error
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    named = [name for name, _ in modules if name]
    names = [name for name in named if pattern.fullmatch(name)]
    if not names:
        part = next((name for name in named if pattern.search(name)), None)
        near = "print(model) shows the names" if part is None else f"part of {part!r} does: '.*' stands for the rest"
        raise SlotError(f"no submodule's whole name matches {place!r}; {near}")
    return names
