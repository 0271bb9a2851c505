"""A linear map of fixed low rank."""

from __future__ import annotations

from typing import ClassVar

from esper.growth.blueprints.lowrank import LowRank
from esper.growth.blueprints.registry import register
from esper.growth.site import Layout, Site

RANK = 8


@register
class Lora(LowRank):
    """`LowRank` on tokens, of one small rank whatever the width: what LoRA (Hu et al. 2022) adds to a map."""

    name: ClassVar[str] = "lora"
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.TOKENS})

    @staticmethod
    def rank_at(site: Site) -> int:
        """`RANK`, or the width if that is less."""
        return min(RANK, site.width)
