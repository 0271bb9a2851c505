"""What growth may cost a network at most, and which blueprints that still allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esper.lifecycle.table import SeedTable
from esper.settings import Settings

Floats = NDArray[np.float64]


class Budget(Settings):
    """Caps on all seeds of one network together, fossils included; None: no cap. Masks enforce them."""

    parameters: int | None = Field(default=None, ge=0)
    """Parameters."""
    flops: int | None = Field(default=None, ge=0)
    """FLOPs of one forward pass for one example, counted as blueprints do."""
    memory: int | None = Field(default=None, ge=0)
    """Bytes that parameters, their gradients and their optimizer state take."""


@dataclass(frozen=True)
class Costs:
    """What each blueprint would cost in each slot; all int64 ``[E, S, K]``, 0 where it does not fit."""

    parameters: NDArray[np.int64]
    flops: NDArray[np.int64]
    memory: NDArray[np.int64]
    """Bytes."""


def resident(per_blueprint: NDArray[np.int64], table: SeedTable) -> NDArray[np.int64]:
    """``[E, S]``: the entry of each slot's seed in ``per_blueprint [E, S, K]``; 0 in slots without a seed."""
    blueprint = np.maximum(table.blueprint, 0).astype(np.int64)
    return np.take_along_axis(per_blueprint, blueprint[..., None], axis=2)[..., 0] * table.owning


def affordable(budget: Budget, costs: Costs, table: SeedTable) -> NDArray[np.bool_]:
    """``[E, S, K]``: the blueprints whose cost, on top of that of the seeds that are there, stays within all caps."""
    allowed = np.ones(costs.parameters.shape, np.bool_)
    for cap, cost in _capped(budget, costs):
        spent = resident(cost, table).sum(axis=1)
        allowed &= spent[:, None, None] + cost <= cap
    return allowed


def budget_left(budget: Budget, costs: Costs, table: SeedTable) -> Floats:
    """``[E]``: the share of the scarcest cap that is not spent yet, in [0, 1]; 1 without caps."""
    left = np.ones(len(table.stage))
    for cap, cost in _capped(budget, costs):
        left = np.minimum(left, 1 - resident(cost, table).sum(axis=1) / max(cap, 1) if cap else 0.0)
    return left


def _capped(budget: Budget, costs: Costs) -> list[tuple[int, NDArray[np.int64]]]:
    """Every cap that is set, with what counts against it."""
    pairs = (
        (budget.parameters, costs.parameters),
        (budget.flops, costs.flops),
        (budget.memory, costs.memory),
    )
    return [(cap, cost) for cap, cost in pairs if cap is not None]
