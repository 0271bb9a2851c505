"""Depth: a copy of the block that the slot follows, placed after it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint, Context, Family, Folded, LayerCall, register
from esper.growth.sharding import copy_whole
from esper.growth.site import Layer, Layout, Site


@register
class BlockCopy(Blueprint):
    """``s(h) = block(h) - h`` with a copy of the block that returned ``h``: at alpha 1 a second such block after it.

    Stacking (Gong et al. 2019; Du et al. 2024, arXiv 2405.15319), under alpha: a network with it is the one without at
    alpha 0, and the deeper one at alpha 1, both to the bit. The copy begins with the values that the block has by then;
    but for the first argument it is called as the block is. What grew within the block is not copied. What learns in it
    learns in the copy, and of a frozen block what learned before; all, if nothing did. Quantised blocks have no copies.

    Unlike other blueprints it is not zero at birth and has what the block has, such as dropout and running statistics.
    """

    name: ClassVar[str] = "block_copy"
    family: ClassVar[Family] = Family.ATTENTION
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False  # more than the host itself does
    reads: ClassVar[Context] = Context.CALL

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        assert site.layer is not None
        self.block = copy_whole(site.layer)
        learning = _list_learning(site.layer)
        for name, parameter in self.block.named_parameters():
            parameter.requires_grad_(name in learning)

    def forward(self, features: Tensor, inputs: LayerCall, /) -> Tensor:
        return self._run(features, inputs) - features

    def add_to(self, features: Tensor, inputs: LayerCall, alpha: Tensor) -> Tensor:
        """``(1 - alpha) * h + alpha * block(h)``, which is exactly ``h`` or ``block(h)`` at either end."""
        return torch.lerp(features, self._run(features, inputs).to(features.dtype), alpha.to(features.dtype))

    def _run(self, features: Tensor, inputs: LayerCall) -> Tensor:
        arguments, keywords = inputs.with_first(features)
        returned: Tensor = self.block(*arguments, **keywords)
        return returned

    def find_block(self) -> nn.Module | None:
        return self.block

    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Insert the block behind the other, in the container that it is in; at alpha 1 only."""
        parent, _, place = name.rpartition(".")
        container = host.get_submodule(parent)
        if weight != 1 or not isinstance(container, nn.Sequential | nn.ModuleList) or not place.isdecimal():
            return Folded.NOT
        container.insert(int(place) + 1, self.block)
        return Folded.INSERTED

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        assert site.layer is not None, "ask serves(site) first"
        return sum(parameter.numel() for parameter in site.layer.module.parameters())

    @classmethod
    def flops_at(cls, site: Site) -> int:
        assert site.layer is not None, "ask serves(site) first"
        assert site.layer.flops is not None
        return site.layer.flops

    @classmethod
    def serves(cls, site: Site) -> bool:
        layer = site.layer
        if layer is None or layer.flops is None or layer.quantised:
            return False
        return super().serves(site) and layer.keeps_shape


@register
class BlockZero(BlockCopy):
    """`BlockCopy` whose last layer in every branch is zero at birth, so that it is the identity whatever its alpha.

    As zero-initialised residual branches (Goyal et al. 2017, arXiv 1706.02677, section 5.1; LLaMA Pro, Wu et al. 2024,
    arXiv 2401.02415). It serves blocks of the form ``h + f(h) + ...`` alone: where something follows the sum, such as
    the normalisation of a post-norm block, no such block is the identity.
    """

    name: ClassVar[str] = "block_zero"
    silences: ClassVar[bool] = True

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        assert site.layer is not None
        with torch.no_grad():
            for name in site.layer.outputs:
                self.block.get_parameter(name).zero_().requires_grad_(True)  # or it would stay the identity

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and site.layer is not None and bool(site.layer.outputs)


def _list_learning(layer: Layer) -> set[str]:
    """Names of the parameters of a layer's module that are to learn in a copy."""
    named = dict(layer.module.named_parameters())
    return {name for name, one in named.items() if one.requires_grad or name in layer.learning} or set(named)
