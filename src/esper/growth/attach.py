"""Put growth slots on a model."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, Strict, TypeAdapter
from torch import nn

from esper.config.arguments import ARGUMENTS, Advice, check_arguments
from esper.errors import SlotError
from esper.growth.blueprints.registry import Context, get
from esper.growth.hooks import WHOLE, find_submodule, list_named_modules
from esper.growth.inputs import Arguments, PlainModule
from esper.growth.model import GrowingModel

PATTERN = "re:"
_COMPILED = "_orig_mod"
"""Name of the original inside a model from `torch.compile`."""
AUTO = "auto"
"""Stands for all blueprints that fit."""


_Names = Annotated[list[str], Strict(False)]
"""Names in any iterable, but not a text alone."""
_Chain = Annotated[tuple[str, ...], Field(min_length=2)]
_PLACES = TypeAdapter[Any](Annotated[dict[str | _Chain, str | _Names], Strict(False)] | _Names, config=ARGUMENTS)
_PARTS = TypeAdapter[Any](bool | _Names, config=ARGUMENTS)

Place = str | tuple[str, ...]
"""Name of a submodule, or ``re:`` and a regular expression; or the names of modules between which units may grow."""
Places = Annotated[
    Sequence[str] | Mapping[Place, Sequence[str] | str] | Mapping[str, Sequence[str] | str],
    PlainValidator(_PLACES.validate_python),
    Advice(
        "give a list of submodules' names, such as ['layer2'], or a mapping from names to a list of blueprints or "
        "'auto'"
    ),
]
"""Names of submodules, or ``re:`` and a regular expression; or a mapping from places to available blueprints."""
FrozenParts = Annotated[
    bool | Sequence[str],
    PlainValidator(_PARTS.validate_python),
    Advice("give True, False, or a list of submodules' names or patterns, such as ['encoder']"),
]


@check_arguments(SlotError)
def attach(
    model: PlainModule,
    slots: Places,
    example_input: Arguments,
    *,
    causal: bool | None = None,
    freeze_host: FrozenParts = False,
) -> GrowingModel:
    """Add growth slots after some submodules of ``model``.

    ```python
    growing = attach(net, {"layer2": ["conv3x3", "squeeze_excite"], r"re:blocks\\.\\d+": "auto"}, images[:2])
    ```

    The model and its state-dict keys do not change. A slot is a forward hook, and does nothing while it is empty.
    Attach before `torch.compile`, and compile what `finalize` returns: a growing model runs in graphs only between its
    slots.

    Args:
        model: Any module.
        slots: Names of submodules, or a mapping from names to lists of blueprints or ``"auto"``: all that fit, for
            tokens without those that mix positions, such as ``attention``. A name that starts with ``re:`` is a regular
            expression that must match whole names; `GrowingModel.summary` prints how many each matches. For new hidden
            units (``units``, ``units_8``), pass a tuple that lists the first layer, everything between, and the last
            layer, in call order: ``("fc1", "act", "fc2")``. Layers are linear or convolutions; between them are
            activations and dropout. The slot is after the last layer and has its name.
        example_input: Arguments of the model with at least two examples: a tensor, a tuple of positional arguments, or
            a dictionary of keyword arguments. It is used in a forward pass to find the features at each slot.
        causal: Whether tokens must not depend on later ones, as in a language model; None: detected by a forward pass.
        freeze_host: Whether only seeds learn and the host stays bit for bit the same: its parameters require no
            gradient, and it stays in evaluation mode, without dropout or new statistics. Names or patterns, as in
            ``slots``, freeze only these submodules and their children.

    Raises:
        SlotError: a name or pattern matches nothing, or two match the same submodule; a submodule is shared, not called
            exactly once, or has no features that a slot can use; a blueprint does not support a site; or something
            between layers of units is not named or does not act on each unit alone.
        UnknownBlueprintError: a blueprint is not registered.
    """
    parts = list_named_modules(model)
    if any(_is_compiled(part) for _, part in parts) or any(name.rpartition(".")[2] == _COMPILED for name, _ in parts):
        raise SlotError(
            "the model or a part of it is compiled, and hooks that come later are ignored: attach before torch.compile"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise SlotError("the model was made under torch.inference_mode and cannot be trained: make it outside")
    # Blueprints by name or pattern; None: all that fit.
    offers: dict[Place, list[str] | None] = dict.fromkeys(slots)
    for place, blueprints in slots.items() if isinstance(slots, Mapping) else ():
        if isinstance(blueprints, str) and blueprints != AUTO:
            raise SlotError(f"the blueprints of slot {place!r} are {blueprints!r}: give a list of names, or 'auto'")
        if not isinstance(blueprints, str):
            offers[place] = [get(name).name for name in blueprints]
    # Names of the submodules to freeze; a shared submodule has several names.
    matches: dict[str, int] = {}
    if isinstance(freeze_host, bool):
        frozen = [WHOLE] if freeze_host else []
    else:
        names = (name for place in freeze_host for name in _match_names(model, place, matches))
        frozen = list(dict.fromkeys(names))
        for name in frozen:
            find_submodule(model, name)
        if WHOLE in frozen:
            raise SlotError("freeze_host names no submodule by '': freeze_host=True freezes all")
    # Patterns are replaced by the names that they match.
    if not offers:
        raise SlotError("no slots: name the submodules behind which the model may grow")
    blueprints_by_name: dict[str, Sequence[str] | None] = {}
    chains = [place for place in offers if isinstance(place, tuple)]
    for place, offer in offers.items():
        names = [place[-1]] if isinstance(place, tuple) else _match_names(model, place, matches)
        grows_units = offer is not None and any(get(kind).context is Context.HIDDEN for kind in offer)
        if isinstance(place, tuple) and not grows_units:
            raise SlotError(
                f"no blueprint for units is given between the layers {place}: name one, such as 'units_8', or name "
                f"only {place[-1]!r}"
            )
        if grows_units and not isinstance(place, tuple):
            raise SlotError(
                f"units grow between two layers, and {place!r} names one place: name the first layer, the modules "
                "between in the order of their calls, and the last layer, as in {('fc1', 'act', 'fc2'): ['units_8']}"
            )
        for name in names:
            if name in blueprints_by_name:
                raise SlotError(f"{place!r} matches submodule {name!r}, which already has a slot")
            blueprints_by_name[name] = offer
    for name in dict.fromkeys(name for chain in chains for name in chain[:-1] if name in blueprints_by_name):
        offer = blueprints_by_name[name]
        if offer is None or any(get(kind).context not in (Context.LAYER, Context.HIDDEN) for kind in offer):
            raise SlotError(
                f"units may grow at {name!r}, where finalize can merge no more than lora_K: offer only that"
            )
    return GrowingModel(
        model, blueprints_by_name, example_input, causal=causal, chains=chains, frozen=frozen, matches=matches
    )


def _is_compiled(part: nn.Module) -> bool:
    """Whether `Module.compile` was called: its result is all that a pickle of a module leaves out."""
    left_out = vars(part).keys() - nn.Module.__getstate__(part).keys()
    return any(vars(part)[name] is not None for name in left_out)


def _match_names(model: nn.Module, place: str, matches: dict[str, int]) -> list[str]:
    """Names of the submodules that a pattern matches, or the name itself; ``matches`` gets their number by pattern."""
    if not place.startswith(PATTERN):
        return [place]
    try:
        pattern = re.compile(place.removeprefix(PATTERN))
    except re.error as error:
        raise SlotError(f"slot {place!r} is not a valid regular expression: {error}") from error
    names = [name for name, _ in list_named_modules(model) if name]
    # The whole name must match; partial matches only improve the error message.
    found = [name for name in names if pattern.fullmatch(name)]
    if not found:
        part = next((name for name in names if pattern.search(name)), None)
        hint = "print(model) shows the names" if part is None else f"it matches part of {part!r}: add '.*' for the rest"
        raise SlotError(f"{place!r} matches no whole name of a submodule; {hint}")
    matches[place] = len(found)
    return found
