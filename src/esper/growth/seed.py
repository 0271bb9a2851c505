"""A seed: a blueprint's module in a slot, and the blend by which its output joins the host's features.

A seed adds ``alpha`` times its *change* to the features ``h``. With ``s`` as the blueprint's output, the change is:

- `Blend.ADD`: ``s(h)``;
- `Blend.GATE`: ``g * s(h)`` with a learned gate ``g = sigmoid(w * h + b)`` for each channel; ``w = b = 0`` at birth;
- `Blend.MULTIPLY`: ``h * tanh s(h)``.

``s`` is zero at birth, and so is every change. A blend may have parameters in addition to the blueprint's. It costs no
FLOPs, because only matrix products and convolutions are counted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from esper.errors import ConfigError
from esper.growth.blueprints.registry import LAYER_CONTEXTS, Blueprint, Context
from esper.growth.site import CHANNELS_LAST, Site
from esper.lifecycle.actions import Blend
from esper.numerics.modules import Stackable


class BlendGate(nn.Module):
    """``sigmoid(weight * h + bias)``, channel by channel; half open at birth.

    It also computes R gates from stacked parameters ``[R, *shape]`` and features ``[R, B, ...]``, as if `Stackable`.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        # One value per channel, with an axis of size 1 for each axis after the channels.
        trailing_axes = 0 if site.layout in CHANNELS_LAST else len(site.extent)
        shape = (site.width, *[1] * trailing_axes)
        self._leading_axes = 1 + len(site.shape) - len(shape)  # the batch, and tokens
        self._first_axis = -len(shape)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        return torch.sigmoid(self._spread(self.weight) * features + self._spread(self.bias))

    def _spread(self, parameter: Tensor) -> Tensor:
        """``[..., *shape]`` -> ``[..., 1, *shape]``, with as many axes as the features."""
        for _ in range(self._leading_axes):
            parameter = parameter.unsqueeze(self._first_axis - 1)
        return parameter


class BlendedBlueprint(nn.Module):
    """A blueprint and its blend, which compute a seed's change at full weight.

    Args:
        blueprint: A blueprint made for ``site``.
        site: The site of the slot.
        blend: How the blueprint's output is combined with the features.
    """

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.blend = blend
        self.gate = BlendGate(site) if blend is Blend.GATE else None

    @property
    def context(self) -> Context:
        """What the blueprint gets in addition to the features."""
        return self.blueprint.context

    def flops_at(self, site: Site) -> int:
        """FLOPs of one forward pass for one example."""
        return self.blueprint.flops_at(site)

    def forward(self, features: Tensor, inputs: Any) -> Tensor:
        return self.change(features, inputs)

    def change(self, features: Tensor, inputs: Any) -> Tensor:
        """The change at full weight, in the shape and dtype of ``features``."""
        # Under autocast some blueprints compute in float32; the host expects its own dtype.
        contribution: Tensor = self.blueprint(features, inputs).to(features.dtype)
        # GATE, MULTIPLY or ADD, as in the formulas above.
        if self.gate is not None:
            return self.gate(features).to(features.dtype) * contribution
        if self.blend is Blend.MULTIPLY:
            return features * contribution.tanh()
        return contribution


class StackableBlendedBlueprint(BlendedBlueprint, Stackable):
    """A blended blueprint that is `Stackable`."""


def blend_blueprint(blueprint: Blueprint, site: Site, blend: Blend) -> Blueprint | BlendedBlueprint:
    """A module that computes a seed's change; with `Blend.ADD` it is the blueprint itself."""
    if blend is Blend.ADD:
        return blueprint
    return (StackableBlendedBlueprint if isinstance(blueprint, Stackable) else BlendedBlueprint)(blueprint, site, blend)


def require_blends(blends: Sequence[Blend], kinds: Iterable[type[Blueprint]]) -> None:
    """Reject blends that one of the blueprints does not support."""
    only_adding = next((kind.name for kind in kinds if kind.context in LAYER_CONTEXTS), None)
    if only_adding is not None and tuple(blends) != (Blend.ADD,):
        raise ConfigError(f"rules.blends: blueprint {only_adding!r} only adds to the features: allow only 'add'")


def count_blend_parameters(blend: Blend, site: Site) -> int:
    """Number of parameters of the blend at ``site``, without those of the blueprint."""
    return 2 * site.width if blend is Blend.GATE else 0


class Seed(BlendedBlueprint):
    """``h + alpha * change(h)``, where ``h`` is the host's features and ``alpha`` the seed's weight."""

    alpha: Tensor

    def __init__(self, blueprint: Blueprint, site: Site, blend: Blend = Blend.ADD) -> None:
        super().__init__(blueprint, site, blend)
        self.fossilized = False
        self.contribution: float | None = None
        """Accuracy with the seed minus accuracy without it, as last measured by a grower."""
        self.register_buffer("alpha", torch.zeros(()))
        self.fixed = tuple(name for name, parameter in self.named_parameters() if not parameter.requires_grad)
        """Names of parameters that the blueprint has fixed."""

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the seed's parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """`torch.nn.Module.requires_grad_` for all but the `fixed` parameters."""
        super().requires_grad_(requires_grad)
        for name in self.fixed:
            self.get_parameter(name).requires_grad_(False)
        return self

    def fix_parameters(self, names: Sequence[str]) -> None:
        """Fix these parameters and no others, for instance as in a saved seed."""
        self.fixed = tuple(names)
        self.requires_grad_(True)

    def forward(self, features: Tensor, inputs: Any) -> Tensor:
        # With ADD, the blueprint computes the sum, which for a block is exact at alpha 1.
        if self.blend is Blend.ADD:
            return self.blueprint.add_to(features, inputs, self.alpha)
        return features + self.alpha * self.change(features, inputs)

    @contextmanager
    def temporary_alpha(self, alpha: float) -> Generator[None]:
        """Context manager in which the seed takes part with ``alpha``."""
        # In place, because compiled code and averages keep references to the buffer.
        alpha_before = self.alpha.clone()
        self.alpha.fill_(alpha)
        try:
            yield
        finally:
            self.alpha.copy_(alpha_before)
