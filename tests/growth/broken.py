"""A blueprint that fails."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint, Family
from esper.growth.site import Layout, Site


class Broken(Blueprint):
    """Fails when it is made, half way through."""

    name: ClassVar[str] = "broken"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.weight = nn.Parameter(torch.zeros(site.width))
        raise MemoryError("no room")

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return features

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return 1

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 1
