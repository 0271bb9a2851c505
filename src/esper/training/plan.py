"""What all networks of a population share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from esper.lifecycle.rules import Rules
from esper.tasks.suite import OptimizerSettings
from esper.training.budget import Budget

Strategy = Literal["stacked", "looped"]
"""How the networks are run: as one program, or one after the other. The results are the same."""
StrategyChoice = Strategy | Literal["auto"]
"""``auto``: whichever is faster here, found out by timing both once."""
STRATEGIES: tuple[Strategy, ...] = ("stacked", "looped")


@dataclass(frozen=True)
class PopulationPlan:
    """The architecture of a population, what may grow on it, and how it is trained."""

    template: nn.Module
    """The host at full width; only its architecture matters."""
    slots: tuple[str, ...]
    """Submodules that get a slot, first to last."""
    blueprints: tuple[str, ...]
    """Registry names on offer; a blueprint's index in actions and tables is its index here."""
    example_input: Tensor
    """``[B, ...]``, for the probe forward."""
    optimizer: OptimizerSettings = OptimizerSettings()
    rules: Rules = Rules()
    strategy: Strategy = "stacked"
    networks_per_pass: int | None = None
    """The most networks that are computed at once, so that what a pass keeps fits into memory; None: all of them. The
    results are the same."""
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    budget: Budget = Budget()
