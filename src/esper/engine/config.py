"""Settings of growth: rollbacks, caps on its cost, how often modules are measured, and when it ends."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.engine.budget import Budget
from esper.engine.governor import GovernorSettings
from esper.engine.gradients import GradientHealthSettings
from esper.engine.promises import PromiseSettings
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints


class EpisodeConfig(Settings):
    """Settings of episodes beside the lifecycle's rules, and of a model's growth under an `esper.Grower`."""

    governor: GovernorSettings | None = GovernorSettings()
    """Rolls networks back when training blows up; null: no rollbacks."""
    budget: Budget = Budget()
    """Caps on what growth may cost."""
    gradient_health: GradientHealthSettings = GradientHealthSettings()
    """When the gradient of a seed is healthy (gate G2)."""
    plateau: int | None = Field(default=None, ge=1, le=1000)
    """Decisions without an improvement of the validation loss after which an episode ends, unless a seed is still
    unfinished; null: episodes run to their horizon. A grower then stops deciding, and reports it; it uses its metric if
    one was named."""
    counterfactual_every: int = Field(default=1, ge=1, le=1000)
    """Decisions from one counterfactual of a slot to its next. Slots take turns. In between the last measurement is
    used, and controllers see its age. Beyond `rules.evidence_max_age` + 1, seeds may have to wait for gate G5."""

    promise: PromiseSettings | None = None
    """Measure what every blueprint promises in every free slot, which controllers then see; null: not, unless the
    controller needs it."""

    def require_measurements(self, horizon: int) -> None:
        """Raise ValueError unless an episode of so many decisions measures every slot, and promises in time."""
        if self.counterfactual_every > horizon:
            raise ValueError(
                f"conduct.counterfactual_every is {self.counterfactual_every}, but there are {horizon} decisions: "
                "some slots would never be measured, nor their seeds be kept; lower it"
            )
        if self.promise is not None and self.promise.first >= horizon:
            raise ValueError(
                f"promises are first measured after {self.promise.first} decisions, but there are {horizon}: nothing "
                "would be measured in time; lower conduct.promise.first, or policy.advice.rule.promise.first"
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
