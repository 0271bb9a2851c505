"""Settings of growth: rollbacks, caps on its cost, how often modules are measured, and when it ends."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.engine.budget import Budget
from esper.engine.governor import GovernorSettings
from esper.engine.gradients import GradientHealthSettings
from esper.growth.promise import PromiseSettings
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints


class EpisodeConfig(Settings):
    """Settings of episodes and of an `esper.Grower`: rollbacks, budget, measurements and plateau."""

    governor: GovernorSettings | None = GovernorSettings()
    """Detects diverged training and rolls it back; null: no rollbacks."""
    budget: Budget = Budget()
    """Limits on the cost of growth."""
    gradient_health: GradientHealthSettings = GradientHealthSettings()
    """When the gradient of a seed is healthy (gate G2)."""
    plateau: int | None = Field(default=None, ge=1, le=1000)
    """Decisions without improvement of the validation loss after which an episode ends, if no seed is unfinished; null:
    episodes run to their horizon. A grower then stops deciding and is `finished`; it uses its metric if you named one.
    """
    counterfactual_every: int = Field(default=1, ge=1, le=1000)
    """Decisions from one measurement of a slot's contribution to the next. Slots take turns. In between, the last
    measurement is used, and controllers observe its age. Above `rules.measurement_max_age` + 1, seeds may have to wait
    for gate G5."""

    promise: PromiseSettings | None = None
    """Measure promises of all blueprints in all free slots for the controller; null: only if the controller needs them.
    """

    def require_measurements(self, horizon: int) -> None:
        """Raise ValueError unless an episode of so many decisions measures every slot, and promises in time."""
        if self.counterfactual_every > horizon:
            raise ValueError(
                f"conduct.counterfactual_every is {self.counterfactual_every}, but there are only {horizon} decisions: "
                "some slots would never be measured, and their seeds never kept; lower it"
            )
        if self.promise is not None and self.promise.first >= horizon:
            raise ValueError(
                f"promises are first measured after {self.promise.first} decisions, but there are only {horizon}: "
                "lower conduct.promise.first, or policy.advice.rule.promise.first"
            )

    def find_due_counterfactuals(self, decision: Ints, slots: int) -> Bools:
        """The slots whose counterfactuals are measured after the decision of number ``decision [E]``: ``[E, S]``.

        They depend on each network's own number of decisions alone.
        """
        # Slots take turns: each is due at another remainder.
        return (decision[:, None] + np.arange(slots)) % self.counterfactual_every == 0

    def find_stalled(self, plateau_age: Floats, table: SeedTable) -> Bools:
        """The networks that end on a plateau, ``[E]``, after ``plateau_age [E]`` decisions without an improvement."""
        if self.plateau is None:
            return np.zeros(len(plateau_age), np.bool_)
        # A living seed may still bring the improvement.
        return (plateau_age >= self.plateau) & ~table.live.any(axis=1)
