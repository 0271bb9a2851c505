"""What a blueprint promises, and the registry that finds blueprints by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from esper.errors import ConfigError, SlotError, UnknownBlueprintError, did_you_mean
from esper.growth.site import Layout, Site


class Family(StrEnum):
    """What kind of help a blueprint offers; controllers see it, so that they can generalise over blueprints."""

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
    """Rescales channels by what all positions show."""
    SPATIAL = "spatial"
    """Mixes neighbouring samples or pixels."""


class Reads(StrEnum):
    """What a blueprint looks at beside the features."""

    NOTHING = "nothing"
    NETWORK = "network"
    """The network's input."""
    LAYER = "layer"
    """The first argument of the layer that its slot follows."""
    CALL = "call"
    """All arguments of that layer, as a `LayerCall`."""


class LayerCall(NamedTuple):
    """What a layer was called with."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def first(self) -> Tensor | None:
        """The first argument, if it is a tensor."""
        first = next(iter((*self.arguments, *self.keywords.values())), None)
        return first if isinstance(first, Tensor) else None

    def with_first(self, features: Tensor) -> LayerCall:
        """The same call with ``features`` in place of the first argument."""
        if self.arguments:
            return LayerCall((features, *self.arguments[1:]), self.keywords)
        return LayerCall((), {**self.keywords, **dict.fromkeys(list(self.keywords)[:1], features)})

    @property
    def alone(self) -> bool:
        """Whether there is no other argument that says anything."""
        others = (*self.arguments[1:], *self.keywords.values())
        return len(self.arguments) > 0 and all(other is None or other is False for other in others)


class Folded(StrEnum):
    """What became of a blueprint that was to be made part of a plain host."""

    NOT = "not"
    """Nothing: a graph is to do it."""
    MERGED = "merged"
    """It is in the values of parameters that were there before."""
    INSERTED = "inserted"
    """It is the next module in the container that the submodule is in: those behind it have other names now."""


LAYER_CONTEXTS = frozenset({Context.LAYER, Context.CALL})
"""What blueprints read that are made for one layer of one host. Populations have none, and ``"auto"`` offers none."""


class Blueprint(nn.Module, ABC):
    """A module that computes a seed's contribution ``s(h)``; the slot returns ``h + alpha * s(h)``.

    Every blueprint keeps these promises, and the tests hold the whole registry to them:

    - *identity at birth, and alive*: ``s`` is exactly zero at birth, a gradient reaches the module all the same, and
      within two optimizer steps every parameter tensor moves;
    - *padding*: with parameters and buffers padded by zeros at the end of each axis to the shapes of a wider site, and
      features padded by zero channels, the first channels come out as from the narrow module, and the padded entries
      get gradients of exactly zero as long as only those channels are read;
    - *batching*: works under ``vmap(functional_call(...))`` over stacked parameters and buffers, at any batch size,
      and, if it is also `Stackable`, without the vmap as well, which spares a population its cost;
    - *explicit randomness*: parameters live on the generator's device and are drawn from it alone;
    - it is stateless: no running statistics, no dropout.

    Args:
        site: where the seed will live.
        generator: source of the initial values.

    Raises:
        SlotError: the blueprint does not serve the site.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    layouts: ClassVar[frozenset[Layout]]
    mixes_positions: ClassVar[bool] = True
    """Whether what comes out at one position may depend on others; where positions stay apart only others serve."""
    looks_ahead: ClassVar[bool] = True
    """Whether one that mixes positions may depend on later ones; at causal sites only others serve."""
    reads: ClassVar[Context] = Context.NOTHING
    """What ``forward`` is given as ``inputs``; those that read nothing there may be given anything."""
    silences: ClassVar[bool] = False
    """Whether it is to know the `Layer.outputs` of its layer, which cost a few calls of the layer to find."""

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__()
        if not self.serves(site):
            raise SlotError(f"blueprint {self.name!r} does not serve {site}; use one of `for_site(site)`")
        self.layout = site.layout

    @abstractmethod
    def forward(self, features: Tensor, inputs: Any, /) -> Tensor:
        """The contribution, shaped as ``features``. ``inputs`` is what the blueprint `reads`; most ignore it."""

    def add_to(self, features: Tensor, inputs: Any, alpha: Tensor) -> Tensor:
        """``h + alpha * s(h)``, shaped and typed as ``features``; ``alpha`` is a number."""
        # Under autocast some blueprints compute in float32; the host is to see the type that it made.
        return features + alpha * self(features, inputs).to(features.dtype)

    def find_block(self) -> nn.Module | None:
        """The block that it adds to those of the host, if it is one of their kind."""
        return None

    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Make this, at that weight, part of a plain ``host`` behind its submodule ``name``, if it can be done better
        than by a graph that runs behind it.

        Only what reads the layer, whose input such a graph does not see, has to.

        Raises:
            ExportError: neither can be done.
        """
        return Folded.NOT

    @classmethod
    @abstractmethod
    def parameters_at(cls, site: Site) -> int:
        """How many parameters the blueprint has at ``site``."""

    @classmethod
    @abstractmethod
    def flops_at(cls, site: Site) -> int:
        """FLOPs of one forward pass for one example.

        Each product of weights and features, or of features with each other, counts two (a multiply-add). Additions of
        biases, constant factors, activations, reductions and padding are free.
        """

    @classmethod
    def serves(cls, site: Site) -> bool:
        """Whether the blueprint can live at ``site``."""
        mixes_wrongly = site.apart or (site.causal and cls.looks_ahead)
        return site.layout in cls.layouts and not (cls.mixes_positions and mixes_wrongly)


_registry: dict[str, type[Blueprint]] = {}

_B = TypeVar("_B", bound=Blueprint)


def register(kind: type[_B]) -> type[_B]:
    """Class decorator that makes a blueprint known by its ``name``.

    Raises:
        ConfigError: another blueprint has that name.
    """
    if kind.name in _registry:
        taken = _registry[kind.name]
        raise ConfigError(
            f"blueprint name {kind.name!r} of {kind.__module__}.{kind.__qualname__} is taken by "
            f"{taken.__module__}.{taken.__qualname__}; choose another name"
        )
    _registry[kind.name] = kind
    return kind


def get(name: str) -> type[Blueprint]:
    """The blueprint called ``name``.

    Raises:
        UnknownBlueprintError: nobody registered that name.
    """
    if name not in _registry:
        hint = did_you_mean(name, _registry) or f"; known are {', '.join(names())}"
        raise UnknownBlueprintError(f"unknown blueprint {name!r}{hint}")
    return _registry[name]


def names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_registry))


def for_site(site: Site) -> tuple[type[Blueprint], ...]:
    """The blueprints that can live at ``site``, sorted by name."""
    return tuple(_registry[name] for name in names() if _registry[name].serves(site))
