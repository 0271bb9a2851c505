"""A seed: a blueprint's module in a slot, and how its output joins the host's features."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from esper.growth.blending import Joined
from esper.growth.blueprints.registry import Blueprint
from esper.growth.site import Site
from esper.lifecycle.actions import Blend


class Seed(Joined):
    """``h + alpha * change(h)``, where ``h`` is the host's features and ``alpha`` the seed's weight.

    An *estranged* seed learns by the straight-through estimator (Bengio et al., 2013): it reads detached features at
    full weight, its output is taken back from the value but not from the gradient, and the host's output stays as it is
    without it. It does not see what its own output does, and so drifts without bound: for comparisons only.
    """

    alpha: Tensor

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend = Blend.ADD) -> None:
        super().__init__(blueprint, site, blend)
        self.fossilized = False
        self.estranged = False
        self.contribution: float | None = None
        """Accuracy with the seed less accuracy without it, as a grower last measured it."""
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        if self.estranged:
            apart = self.change(features.detach(), inputs)
            return features + (apart - apart.detach())
        return features + self.alpha * self.change(features, inputs)

    @contextmanager
    def weighing(self, alpha: float) -> Generator[None]:
        """Within the block the seed counts with ``alpha``, whatever it did before and will do after."""
        usual, estranged = self.alpha.clone(), self.estranged
        self.estranged = False
        self.alpha.fill_(alpha)
        try:
            yield
        finally:
            self.estranged = estranged
            self.alpha.copy_(usual)
