"""A wider two-layer perceptron at each position."""

from __future__ import annotations

from typing import ClassVar

from esper.growth.blueprints.mlp import Mlp
from esper.growth.blueprints.registry import register


@register
class MlpWide(Mlp):
    """`Mlp` with four times the width inside, as in a transformer's block."""

    name: ClassVar[str] = "mlp_wide"
    expansion: ClassVar[int] = 4
