"""Depth: a copy of the block that the slot follows, placed after it."""

from __future__ import annotations

import copy
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import Blueprint, Family, Folded, LayerCall, Reads, register
from esper.growth.hook_tables import GrowthHook, find_hook_tables
from esper.growth.site import Layout, Site


@register
class BlockCopy(Blueprint):
    """``s(h) = block(h) - h`` with a copy of the block that returned ``h``: at alpha 1 a second such block after it.

    Stacking (Gong et al. 2019; Du et al. 2024, arXiv 2405.15319), under alpha: a network with it is the one without at
    alpha 0, and the deeper one at alpha 1. The copy begins with the values that the block has by then; but for the
    first argument it is called as the block is. What grew within the block is not copied.

    Unlike other blueprints it is not zero at birth and has what the block has, such as dropout and running statistics.
    """

    name: ClassVar[str] = "block_copy"
    family: ClassVar[Family] = Family.ATTENTION
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False  # more than the host itself does
    reads: ClassVar[Reads] = Reads.CALL

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        assert site.layer is not None
        self.block = _copy_bare(site.layer.module).requires_grad_(True)

    def forward(self, features: Tensor, inputs: LayerCall, /) -> Tensor:
        returned = cast("Tensor", self.block(features, *inputs.arguments[1:], **inputs.keywords))
        return returned - features

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
        return super().serves(site) and layer is not None and layer.keeps_shape and layer.flops is not None


def _copy_bare(block: nn.Module) -> nn.Module:
    """A copy without the growth slots on it and within it."""
    slots = [hook for module in block.modules() for hook in _list_growth_hooks(module)]
    copied = copy.deepcopy(block, {id(slot): slot for slot in slots})
    for module in copied.modules():
        for table in find_hook_tables(module):
            for key in [key for key, hook in table.items() if isinstance(hook, GrowthHook)]:
                del table[key]
    return copied


def _list_growth_hooks(module: nn.Module) -> list[GrowthHook]:
    return [hook for table in find_hook_tables(module) for hook in table.values() if isinstance(hook, GrowthHook)]
