"""What a task needs to know of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """How a host is trained: AdamW (Loshchilov and Hutter, 2019) at a constant learning rate."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    """Each ends with a decision."""


@dataclass(frozen=True)
class HostKind:
    """A kind of host."""

    build: Callable[[tuple[int, ...], int, torch.Generator], nn.Module]
    """From the shape of one input, the number of classes and the source of the first weights."""
    slots: Mapping[str, tuple[str, ...]]
    """Where it may grow, and by which blueprints."""
    recipe: Recipe
