"""What growth may cost a network at most, and which blueprints that still allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esper.config.arguments import LARGEST
from esper.config.settings import Settings
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints, map_arrays

RentBasis = Literal["parameters", "flops"]
"""What rent is paid on."""

TRAINING_PASSES = 3
"""FLOPs of a training step over those of its forward pass.

A backward pass costs about two forward ones: for every product of weights and features, one for the gradient of either
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Hobbhahn and Sevilla 2021, "What's the backward-forward FLOP ratio
for neural networks?", Epoch AI).
"""


class Budget(Settings):
    """Limits on all seeds of one network together, fossils included; null: no limit.

    A blueprint is available if it fits with every blend that the rules allow.
    """

    parameters: int | None = Field(default=None, ge=0, le=LARGEST)
    """Maximum number of parameters."""
    flops: int | None = Field(default=None, ge=0, le=LARGEST)
    """Maximum FLOPs of a forward pass for one example, as blueprints count them."""
    memory: int | None = Field(default=None, ge=0, le=LARGEST)
    """Maximum bytes of parameters, gradients and optimizer state."""

    def within(self, parameters: int | None) -> Budget:
        """These caps, with at most so many parameters."""
        if parameters is None or (self.parameters is not None and self.parameters <= parameters):
            return self
        return self.model_copy(update={"parameters": parameters})


@dataclass(frozen=True)
class Cost:
    """What seeds would cost in each slot, in one currency: their blueprint's cost and their blend's."""

    blueprints: Ints
    """Each blueprint's, ``[E, S, K]``; 0 where it does not fit."""
    blends: Ints
    """What each `Blend` adds to that, ``[E, S, 3]``."""

    @classmethod
    def of_blueprints(cls, blueprints: Ints) -> Cost:
        """The cost in a currency in which blends are free, as in FLOPs: their work is elementwise."""
        return cls(blueprints, np.zeros((*blueprints.shape[:2], len(Blend)), np.int64))

    def of(self, blueprint: NDArray[np.integer], blend: NDArray[np.integer]) -> Ints:
        """The cost of seeds of these blueprints and blends, ``[..., E, S]``; where there is none (-1), of any."""
        network, slot = np.ogrid[: self.blends.shape[0], : self.blends.shape[1]]
        return self.blueprints[network, slot, np.maximum(blueprint, 0)] + self.blends[network, slot, blend]

    def resident(self, table: SeedTable) -> Ints:
        """The cost of each slot's seed, ``[E, S]``; 0 in slots without a seed."""
        return self.of(table.blueprint, table.blend) * table.owning

    def highest(self, blends: Sequence[Blend]) -> Ints:
        """The cost of each blueprint with the dearest of these blends, ``[E, S, K]``."""
        return self.blueprints + self.blends[..., list(blends)].max(axis=-1, keepdims=True)

    def scale(self, factor: int) -> Cost:
        """The cost in a currency of which ``factor`` make one."""
        return map_arrays(lambda cost: cost * factor, self)


@dataclass(frozen=True)
class Charge:
    """What rent is paid on: costs of seeds beside those of their hosts, in one currency."""

    cost: Cost
    hosts: NDArray[np.integer]
    """``[E]``."""

    @property
    def of_blueprints(self) -> Floats:
        """Each blueprint relative to the host, ``[E, S, K]``."""
        return self.cost.blueprints / self.hosts[:, None, None]

    def of_slots(self, table: SeedTable) -> Floats:
        """Each slot's seed and blend relative to the host, ``[E, S]``; 0 in slots without a seed."""
        return self.cost.resident(table) / self.hosts[:, None]

    def added(self, table: SeedTable, counted: Bools) -> Floats:
        """The seeds in the slots ``counted``, ``[E, S]``, together, relative to the host, ``[E]``."""
        return (self.cost.resident(table) * counted).sum(axis=1) / self.hosts


@dataclass(frozen=True)
class Costs:
    """What seeds would cost."""

    parameters: Cost
    flops: Cost
    memory: Cost
    """Bytes."""


def affordable_blueprints(budget: Budget, costs: Costs, table: SeedTable, blends: Sequence[Blend]) -> Bools:
    """``[E, S, K]``: the blueprints that fit within all caps beside the present seeds, with any of ``blends``."""
    allowed = np.ones(costs.parameters.blueprints.shape, np.bool_)
    for cap, cost in _list_caps(budget, costs):
        spent = cost.resident(table).sum(axis=1)
        allowed &= spent[:, None, None] + cost.highest(blends) <= cap
    return allowed


def budget_left(budget: Budget, costs: Costs, table: SeedTable) -> Floats:
    """``[E]``: the share of the scarcest cap that is not spent yet, in [0, 1]; 1 without caps."""
    left = np.ones(len(table.stage))
    for cap, cost in _list_caps(budget, costs):
        left = np.minimum(left, 1 - cost.resident(table).sum(axis=1) / max(cap, 1) if cap else 0.0)
    return left


def _list_caps(budget: Budget, costs: Costs) -> list[tuple[int, Cost]]:
    """Every cap that is set, with what counts against it."""
    caps = (budget.parameters, budget.flops, budget.memory)
    pairs = zip(caps, (costs.parameters, costs.flops, costs.memory), strict=True)
    return [(cap, cost) for cap, cost in pairs if cap is not None]
