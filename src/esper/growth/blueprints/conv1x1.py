"""A two-layer perceptron at each sample or pixel."""

from __future__ import annotations

from typing import ClassVar

from esper.growth.blueprints.mlp import Mlp
from esper.growth.blueprints.registry import register
from esper.growth.site import Layout


@register
class Conv1x1(Mlp):
    """1x1 convolution, ReLU, 1x1 convolution: an `Mlp` over channels with the site's own width inside."""

    name: ClassVar[str] = "conv1x1"
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.SEQUENCE, Layout.IMAGE})
    expansion: ClassVar[int] = 1
