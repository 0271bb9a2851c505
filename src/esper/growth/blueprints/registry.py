"""The base class of blueprints, and the registry that finds them by name."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from esper.errors import ConfigError, SlotError, UnknownBlueprintError, did_you_mean
from esper.former import warn_of_former
from esper.growth.site import Layout, Site


class Family(StrEnum):
    """What a blueprint does to features; controllers observe it, so that they can generalise over blueprints."""

    NORM = "norm"
    """Rescales features."""
    CHANNEL = "channel"
    """Mixes channels at each position."""
    SKIP = "skip"
    """Brings the network's input back."""
    TOKEN_NEAR = "token_near"
    """Mixes neighbouring tokens."""
    TOKEN_FAR = "token_far"
    """Mixes tokens at any distance by learned position."""
    ATTENTION = "attention"
    """Mixes tokens at any distance by content."""
    GATE = "gate"
    """Rescales channels by statistics over all positions."""
    SPATIAL = "spatial"
    """Mixes neighbouring samples or pixels."""


class Context(StrEnum):
    """What a blueprint gets as its second argument, beside the features."""

    NOTHING = "nothing"
    """Nothing: any value may be passed."""
    NETWORK = "network"
    """The network's input."""
    LAYER = "layer"
    """The first argument of the layer that its slot follows."""
    CALL = "call"
    """All arguments of that layer, as a `LayerCall`."""
    HIDDEN = "hidden"
    """The first argument of the layers that make the hidden units which that layer reads."""


class LayerCall(NamedTuple):
    """Arguments of one call of a layer."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def first_argument(self) -> Tensor | None:
        """The first argument; None if it is no tensor."""
        first = next(iter((*self.arguments, *self.keywords.values())), None)
        return first if isinstance(first, Tensor) else None

    def with_first(self, features: Tensor) -> LayerCall:
        """This call with ``features`` in place of the first argument."""
        if self.arguments:
            return LayerCall((features, *self.arguments[1:]), self.keywords)
        return LayerCall((), {**self.keywords, **dict.fromkeys(list(self.keywords)[:1], features)})

    @property
    def has_single_argument(self) -> bool:
        """Whether all arguments but the first are None or False."""
        rest = (*self.arguments[1:], *self.keywords.values())
        return len(self.arguments) > 0 and all(argument is None or argument is False for argument in rest)


class Folded(StrEnum):
    """How `Blueprint.fold` made a blueprint part of a plain host."""

    NOT = "not"
    """Not at all: it has to run behind the submodule, as a graph."""
    MERGED = "merged"
    """Its weights were added to parameters of the host."""
    INSERTED = "inserted"
    """It was inserted behind the submodule, in the same container: modules behind it have other names now."""
    WIDENED = "widened"
    """Its units were added to layers of the host, which have more outputs and inputs now."""


LAYER_CONTEXTS = frozenset({Context.LAYER, Context.CALL, Context.HIDDEN})
"""Contexts of blueprints that are made for one layer of one host; ``"auto"`` offers none of these, and populations
offer hidden units only."""


class Blueprint(nn.Module, ABC):
    """A module that computes a seed's contribution ``s(h)``; the slot returns ``h + alpha * s(h)``.

    Every blueprint guarantees these properties, which are tested for the whole registry:

    - *identity at birth, and alive*: ``s`` is exactly zero at birth, a gradient reaches the module all the same, and
      within two optimizer steps every parameter tensor moves;
    - *padding*: with parameters and buffers padded by zeros at the end of each axis to the shapes of a wider site, and
      features padded by zero channels, the first channels of the output equal those of the narrow module, and the
      padded entries get gradients of exactly zero if the loss depends on the first channels only;
    - *batching*: it works under ``vmap(functional_call(...))`` over stacked parameters and buffers, at any batch size,
      and, if it is also `Stackable`, without the vmap as well, which spares a population its cost;
    - *explicit randomness*: parameters live on the generator's device and are drawn from it alone;
    - it is stateless: no running statistics, no dropout.

    Args:
        site: where the seed will be planted.
        generator: source of the initial values.

    Raises:
        SlotError: the blueprint does not support the site.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    layouts: ClassVar[frozenset[Layout]]
    mixes_positions: ClassVar[bool] = True
    """Whether the output at one position depends on other positions; then sites with ``apart`` are not supported."""
    is_causal: ClassVar[bool] = False
    """Whether no position depends on later ones; a blueprint that mixes positions needs it at causal sites."""
    context: ClassVar[Context] = Context.NOTHING
    """The second argument of ``forward``."""
    needs_branch_outputs: ClassVar[bool] = False
    """Whether it needs its layer's `Layer.branch_outputs`, which take some calls of the layer to find."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Take class members by their former names, with a warning."""
        super().__init_subclass__(**options)
        for former, name in _RENAMED_MEMBERS.items():
            if former in vars(cls):
                warn_of_former(f"{cls.__qualname__}.{former}: rename it to {name}")
                value = vars(cls)[former]
                setattr(cls, name, not value if name == "is_causal" else value)
        if "supports" in vars(cls):
            cls.serves = vars(cls)["supports"]  # for subclasses that call super().serves(site)

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__()
        if not self.supports(site):
            raise SlotError(f"blueprint {self.name!r} does not support {site}; use one of `for_site(site)`")
        self.layout = site.layout

    @abstractmethod
    def forward(self, features: Tensor, inputs: Any, /) -> Tensor:
        """The contribution, shaped as ``features``. ``inputs`` is the blueprint's `context`; most ignore it."""

    def add_to(self, features: Tensor, inputs: Any, alpha: Tensor) -> Tensor:
        """``h + alpha * s(h)``, shaped and typed as ``features``; ``alpha`` is a scalar."""
        # Under autocast some blueprints compute in float32; the host expects its own type.
        return features + alpha * self(features, inputs).to(features.dtype)

    def find_block(self) -> nn.Module | None:
        """The block by which this blueprint makes the host deeper; None for all but copies of blocks."""
        return None

    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Make this blueprint part of a plain ``host``, if that is better than a graph that runs behind a submodule.

        A blueprint with the context `Context.LAYER` or `Context.HIDDEN` has to, as such a graph does not get the input
        of a layer.

        Args:
            host: A finalized model.
            name: The submodule that the seed follows.
            weight: The seed's alpha.

        Raises:
            ExportError: neither can be done.
        """
        return Folded.NOT

    @classmethod
    @abstractmethod
    def parameters_at(cls, site: Site) -> int:
        """Number of parameters at ``site``."""

    @classmethod
    @abstractmethod
    def flops_at(cls, site: Site) -> int:
        """FLOPs of one forward pass for one example at ``site``.

        As torch counts those of hosts: two for each multiply-add in matrix products, convolutions and attention.
        Elementwise work, such as biases, gates and activations, and reductions and normalisation are free.
        """

    @classmethod
    def supports(cls, site: Site) -> bool:
        """Whether a seed of this blueprint can be planted at ``site``."""
        # Mixing is wrong where positions must stay apart, and where later ones would be mixed in.
        mixes_wrongly = site.apart or (site.causal and not cls.is_causal)
        return site.layout in cls.layouts and not (cls.mixes_positions and mixes_wrongly)

    serves = supports  # its former name


_RENAMED_MEMBERS = {
    "looks_ahead": "is_causal",
    "reads": "context",
    "serves": "supports",
    "silences": "needs_branch_outputs",
}
"""Present names of class members by their former names; ``is_causal`` is the opposite of ``looks_ahead``."""

_registry: dict[str, type[Blueprint]] = {}
_sizes: dict[str, Callable[[int], type[Blueprint]]] = {}
"""By the name of a blueprint, what makes the one of another size."""
_SIZED = re.compile(r"(\w+)_([1-9]\d*)")

_B = TypeVar("_B", bound=Blueprint)


def register(kind: type[_B]) -> type[_B]:
    """Register a blueprint by its ``name``; a class decorator.

    Raises:
        ConfigError: another blueprint has that name.
    """
    # Saved models find blueprints by name: one name must never stand for two classes.
    if kind.name in _registry:
        holder = _registry[kind.name]
        raise ConfigError(
            f"blueprint name {kind.name!r} of {kind.__module__}.{kind.__qualname__} is taken by "
            f"{holder.__module__}.{holder.__qualname__}; choose another name"
        )
    _registry[kind.name] = kind
    return kind


def register_sizes(name: str, make: Callable[[int], type[Blueprint]]) -> None:
    """Let ``NAME_K`` name the blueprint ``make(K)``, the same class for the same K, for any whole number K above 0."""
    _sizes[name] = make


def get(name: str) -> type[Blueprint]:
    """The blueprint called ``name``.

    Raises:
        UnknownBlueprintError: no such blueprint is registered.
    """
    if name not in _registry:
        sized = _SIZED.fullmatch(name)
        if sized is not None and sized[1] in _sizes:
            return _sizes[sized[1]](int(sized[2]))
        hint = did_you_mean(name, _registry) or f"; known are {', '.join(names())}"
        raise UnknownBlueprintError(f"unknown blueprint {name!r}{hint}")
    return _registry[name]


def names() -> tuple[str, ...]:
    """Names of all registered blueprints, sorted; of those of any size (`register_sizes`) the one without a number."""
    return tuple(sorted(_registry))


def for_site(site: Site) -> tuple[type[Blueprint], ...]:
    """The blueprints that support ``site``, sorted by name."""
    return tuple(_registry[name] for name in names() if _registry[name].supports(site))
