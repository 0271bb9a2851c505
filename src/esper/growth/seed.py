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
from esper.lifecycle.rules import Isolation


class Seed(Joined):
    """``h + alpha * change(h)``, where ``h`` is the host's features and ``alpha`` the seed's weight.

    A seed in isolation leaves the host's output as it is without it. In ``shadow`` it takes no part until it is
    `weighing` something, in a pass of its own. In ``straight_through`` it learns by that estimator (Bengio et al.,
    2013): it reads detached features at full weight, and its output is taken back from the value but not from the
    gradient. It does not see what its own output does, and so drifts without bound: for comparisons only.
    """

    alpha: Tensor

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend = Blend.ADD) -> None:
        super().__init__(blueprint, site, blend)
        self.fossilized = False
        self.isolation = Isolation.NONE
        """How it learns at present; NONE: it counts with ``alpha``."""
        self.contribution: float | None = None
        """Accuracy with the seed less accuracy without it, as a grower last measured it."""
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        if self.isolation is Isolation.SHADOW:
            return features
        if self.isolation is Isolation.STRAIGHT_THROUGH:
            apart = self.change(features.detach(), inputs)
            return features + (apart - apart.detach())
        return features + self.alpha * self.change(features, inputs)

    @contextmanager
    def weighing(self, alpha: float) -> Generator[None]:
        """Within the block the seed counts with ``alpha``, whatever it did before and will do after."""
        usual, isolation = self.alpha.clone(), self.isolation
        self.isolation = Isolation.NONE
        self.alpha.fill_(alpha)
        try:
            yield
        finally:
            self.isolation = isolation
            self.alpha.copy_(usual)
