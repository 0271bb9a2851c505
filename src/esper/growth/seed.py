"""A seed: a blueprint's module in a slot, and how its output joins the host's features."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint
from esper.growth.site import CHANNELS_LAST, Site
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation


class Seed(nn.Module):
    """``h`` is the host's features, ``s`` the blueprint's output, which is zero at birth, ``alpha`` the seed's weight.

    - `Blend.ADD`: ``h + alpha * s(h)``;
    - `Blend.GATE`: ``h + alpha * g * s(h)`` with ``g = sigmoid(w * h + b)`` for each channel, that is, the features
      move towards ``h + s(h)`` as far as a learned gate lets them; ``w = b = 0`` at birth;
    - `Blend.MULTIPLY`: ``h * (1 + alpha * tanh s(h))``.

    A seed in isolation leaves the host's output as it is without it. In ``shadow`` it takes no part until it is
    `weighing` something, in a pass of its own. In ``straight_through`` it learns by that estimator (Bengio et al.,
    2013): it reads detached features at full weight, and its output is taken back from the value but not from the
    gradient. It does not see what its own output does, and so drifts without bound: for comparisons only.
    """

    alpha: Tensor

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend = Blend.ADD) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.blend = blend
        self.fossilized = False
        self.isolation = Isolation.NONE
        """How it learns at present; NONE: it counts with ``alpha``."""
        self.contribution: float | None = None
        """Accuracy with the seed less accuracy without it, as a grower last measured it."""
        self.register_buffer("alpha", torch.zeros(()))
        self.gate = Gate(site) if blend is Blend.GATE else None

    def forward(self, features: Tensor, inputs: Tensor) -> Tensor:
        if self.isolation is Isolation.SHADOW:
            return features
        if self.isolation is Isolation.STRAIGHT_THROUGH:
            apart = self._change(features.detach(), inputs)
            return features + (apart - apart.detach())
        return features + self.alpha * self._change(features, inputs)

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

    def _change(self, features: Tensor, inputs: Tensor) -> Tensor:
        """What the seed would add at full weight."""
        # Under autocast some blueprints compute in float32; the host is to see the type that it made.
        contribution: Tensor = self.blueprint(features, inputs).to(features.dtype)
        if self.gate is not None:
            return self.gate(features).to(features.dtype) * contribution
        if self.blend is Blend.MULTIPLY:
            return features * contribution.tanh()
        return contribution


class Gate(nn.Module):
    """``sigmoid(weight * h + bias)``, channel by channel; half open at birth."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        behind = 0 if site.layout in CHANNELS_LAST else len(site.extent)
        shape = (site.width, *[1] * behind)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        return torch.sigmoid(self.weight * features + self.bias)
