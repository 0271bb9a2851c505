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
from esper.growth.site import Layout, Site


class Family(StrEnum):
    """What a blueprint does to features; controllers observe it, so that they can generalise over blueprints."""

    NORM = "norm"
    """Rescales features."""
    CHANNEL = "channel"
    """Mixes channels at each position."""
    SKIP = "skip"
    """Adds the network's input."""
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
    """Nothing: the second argument is ignored."""
    NETWORK = "network"
    """The network's input."""
    LAYER = "layer"
    """The first argument of the layer that its slot follows."""
    CALL = "call"
    """All arguments of that layer, as a `LayerCall`."""
    HIDDEN = "hidden"
    """The first argument of the layer that computes the hidden units which that layer takes as input."""


class LayerCall(NamedTuple):
    """Arguments of one call of a layer."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def first_argument(self) -> Tensor | None:
        """The first argument; None if it is not a tensor."""
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


class BlueprintCost(NamedTuple):
    """What a blueprint costs at a site."""

    parameters: int
    """Number of scalars."""
    flops: int
    """FLOPs of one forward pass for one example, as torch's FLOP counter counts them for hosts.

    Two for each multiply-add in matrix products, convolutions and attention; all other operations count as zero.
    """


class Folded(StrEnum):
    """How `Blueprint.fold` made a blueprint part of a plain host."""

    NOT = "not"
    """Not at all: it has to run after the submodule, as part of a graph."""
    MERGED = "merged"
    """Its weights were added to parameters of the host."""
    INSERTED = "inserted"
    """It was inserted after the submodule, in the same container, which renames the modules after it."""
    WIDENED = "widened"
    """Its units were added to layers of the host, which now have more outputs and inputs."""


LAYER_CONTEXTS = frozenset({Context.LAYER, Context.CALL, Context.HIDDEN})
"""Contexts of blueprints that are made for one layer of one host. ``"auto"`` offers none of them, populations only
those with ``HIDDEN``."""


class Blueprint(nn.Module, ABC):
    """A module that computes a seed's contribution ``s(h)``; the slot returns ``h + alpha * s(h)``.

    Every blueprint has these properties, which are tested for the whole registry:

    - *identity at birth, and trainable*: ``s`` is exactly zero at birth, yet the module gets a gradient, and every
      parameter tensor changes within two optimizer steps;
    - *padding*: pad parameters and buffers with zeros at the end of each axis to the shapes of a wider site, and the
      features with zero channels. Then the first channels of the output equal those of the narrow module, and padded
      entries get gradients of exactly zero if the loss depends only on the first channels;
    - *batching*: it works under ``vmap(functional_call(...))`` over stacked parameters and buffers, at any batch size.
      If it is also `Stackable`, it works without the vmap too, which saves a population the cost of vmap;
    - *explicit randomness*: parameters are on the generator's device, and all randomness comes from the generator;
    - *no state*: no running statistics and no dropout.

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
    """Whether the output at one position depends on other positions. If so, ``"auto"`` offers it for images and signals
    only, and it is refused where the host masks padding or caches the past."""
    is_causal: ClassVar[bool] = False
    """Whether the output at causal sites never depends on later positions; required there if positions are mixed."""
    context: ClassVar[Context] = Context.NOTHING
    """What ``forward`` gets as its second argument."""
    needs_branch_outputs: ClassVar[bool] = False
    """Whether it needs the layer's `Layer.branch_outputs`; finding them takes a few calls of the layer."""

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__()
        if not self.supports(site):
            raise SlotError(f"blueprint {self.name!r} does not support {site}; use one of `for_site(site)`")
        self.layout = site.layout

    @abstractmethod
    def forward(self, features: Tensor, inputs: Any, /) -> Tensor:
        """The contribution ``s(h)``, in the shape of ``features``; ``inputs`` is what the `context` names."""

    def add_to(self, features: Tensor, inputs: Any, alpha: Tensor) -> Tensor:
        """``h + alpha * s(h)``, in the shape and dtype of ``features``; ``alpha`` is a scalar."""
        # Under autocast some blueprints compute in float32; the host expects its own dtype.
        return features + alpha * self(features, inputs).to(features.dtype)

    def find_block(self) -> nn.Module | None:
        """The block that this blueprint adds to the host's depth, if it is a copy of a block."""
        return None

    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Make this blueprint, which follows the submodule ``name``, part of a plain ``host``, with the seed's alpha.

        Blueprints with the context `Context.LAYER` or `Context.HIDDEN` must do so: the graph that otherwise runs after
        the submodule does not get the input of a layer.

        Raises:
            ExportError: the blueprint can neither be folded into the host nor run as a graph.
        """
        return Folded.NOT

    @classmethod
    @abstractmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        """Numbers of parameters and FLOPs at ``site``."""

    @classmethod
    def supports(cls, site: Site) -> bool:
        """Whether a seed of this blueprint can be planted at ``site``."""
        # Later positions must not be mixed into earlier ones at causal sites.
        looks_ahead = cls.mixes_positions and not cls.is_causal
        return site.layout in cls.layouts and not (site.causal and looks_ahead)


_registry: dict[str, type[Blueprint]] = {}
_sizes: dict[str, Callable[[int], type[Blueprint]]] = {}
"""Functions that make a blueprint of a given size, by the blueprint's name."""
_SIZED = re.compile(r"(\w+)_([1-9]\d*)")

_B = TypeVar("_B", bound=Blueprint)


def register(kind: type[_B]) -> type[_B]:
    """Class decorator: register a blueprint under its ``name``, by which saved models find it.

    Raises:
        ConfigError: another blueprint has that name.
    """
    if kind.name in _registry:
        holder = _registry[kind.name]
        raise ConfigError(
            f"blueprint name {kind.name!r} of {kind.__module__}.{kind.__qualname__} is taken by "
            f"{holder.__module__}.{holder.__qualname__}; choose another name"
        )
    _registry[kind.name] = kind
    return kind


def register_sizes(name: str, make: Callable[[int], type[Blueprint]]) -> None:
    """Register ``make(K)``, always the same class, as the blueprint ``NAME_K`` for every integer K of at least 1."""
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
    """Sorted names of all registered blueprints; blueprints of any size (`register_sizes`) appear without a number."""
    return tuple(sorted(_registry))


def for_site(site: Site) -> tuple[type[Blueprint], ...]:
    """The blueprints that support ``site``, sorted by name."""
    return tuple(_registry[name] for name in names() if _registry[name].supports(site))
