"""How a suite's hosts are optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esper.settings import Settings


class OptimizerSettings(Settings):
    """One optimizer for all hosts of a suite; the learning rate belongs to the instance."""

    name: Literal["adamw", "sgd"] = "adamw"
    """``adamw`` uses ``betas``, ``sgd`` uses ``momentum``."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's first and second moments."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled for AdamW, added to the gradient for SGD."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest gradient norm of one network, host and all seeds together, isolated ones too; None: not clipped."""
