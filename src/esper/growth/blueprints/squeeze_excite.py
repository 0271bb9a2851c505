"""Squeeze-and-excitation with more hidden units where there are more channels, as in its paper."""

from __future__ import annotations

from typing import ClassVar

from esper.growth.blueprints.gate import Gate
from esper.growth.blueprints.registry import register
from esper.growth.site import Layout, Site

REDUCTION = 4
"""Channels per hidden unit; Hu et al. 2018 use 16 in networks of hundreds of channels."""


@register
class SqueezeExcite(Gate):
    """`Gate` on samples or pixels whose hidden units grow with the channels."""

    name: ClassVar[str] = "squeeze_excite"
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})

    @classmethod
    def hidden_at(cls, site: Site) -> int:
        return max(1, site.width // REDUCTION)
