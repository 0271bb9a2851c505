"""Every blueprint at sites of every layout it serves, how to fill them with numbers, and blueprints of users."""

import pytest
import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Family, for_site
from esper.growth.site import Layout, Site
from factories import generator

SITES = (
    Site(Layout.FEATURES, width=6, extent=(), input_shape=(5,)),
    Site(Layout.FEATURES, width=9, extent=(), input_shape=(3,)),
    Site(Layout.TOKENS, width=10, extent=(8,), input_shape=(8, 5)),
    Site(Layout.TOKENS, width=3, extent=(4,), input_shape=(4, 2)),
    Site(Layout.SEQUENCE, width=6, extent=(9,), input_shape=(1, 9)),
    Site(Layout.SEQUENCE, width=5, extent=(2,), input_shape=(1, 8)),
    Site(Layout.IMAGE, width=4, extent=(5, 6), input_shape=(3, 5, 6)),
    Site(Layout.IMAGE, width=8, extent=(2, 3), input_shape=(1, 4, 6)),
)
CASES = [
    pytest.param(kind, site, id=f"{kind.name}-{site.layout}-{site.width}") for site in SITES for kind in for_site(site)
]
every_case = pytest.mark.parametrize(("kind", "site"), CASES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def batch(site: Site, size: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Features and network inputs, float64."""
    return draw(size, *site.shape, seed=seed), draw(size, *site.input_shape, seed=seed + 100)


def newborn(kind: type[Blueprint], site: Site, seed: int = 0) -> Blueprint:
    return kind(site, generator(seed)).double()


def grown(kind: type[Blueprint], site: Site, seed: int = 0) -> Blueprint:
    """As after much training: no parameter is zero any more."""
    blueprint = newborn(kind, site, seed)
    for index, parameter in enumerate(blueprint.parameters()):
        parameter.data = draw(*parameter.shape, seed=1000 * seed + index)
    return blueprint


def padded(narrow: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Zeros at the end of each axis."""
    wide = narrow.new_zeros(shape)
    wide[tuple(slice(size) for size in narrow.shape)] = narrow
    return wide


def live_channels(features: Tensor, site: Site) -> Tensor:
    axis = -1 if site.layout in (Layout.FEATURES, Layout.TOKENS) else 1
    return features.narrow(axis, 0, site.width)


class Scaling(Blueprint):
    """A user's blueprint, which scales features."""

    name, family, layouts = "scaling", Family.CHANNEL, frozenset({Layout.FEATURES})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.weight = nn.Parameter(torch.zeros(site.width))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return features * self.weight

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        return BlueprintCost(site.width, 0)


class Broken(Scaling):
    """Fails when it is made, half way through."""

    name, layouts = "broken", frozenset(Layout)

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        raise MemoryError("no room")


class Branching(Scaling):
    """Looks at values, which neither ``vmap`` nor a graph can."""

    name = "branching"

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return features * self.weight if float(features.sum()) < 1e9 else features
