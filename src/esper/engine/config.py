"""Settings of growth: rollbacks, caps on its cost, how often modules are measured, and when it ends."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.engine.budget import Budget
from esper.engine.governor import GovernorSettings
from esper.engine.promises import PromiseSettings
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints


class EpisodeConfig(Settings):
    """Settings of episodes beside the lifecycle's rules, and of a model's growth under an `esper.Grower`."""

    governor: GovernorSettings | None = GovernorSettings()
    """Rolls networks back when training blows up; null: nobody does."""
    budget: Budget = Budget()
    """Caps on what growth may cost."""
    plateau: int | None = Field(default=None, ge=1, le=1000)
    """Decisions without an improvement of the validation loss after which an episode ends, unless a seed is still
    unfinished; null: episodes go on to their horizon. A grower then decides nothing more, and says so; it goes by its
    metric, where one was named."""
    counterfactual_every: int = Field(default=1, ge=1, le=1000)
    """Decisions from one counterfactual of a slot to its next. Slots take turns; in between the last measurement
    stands, and controllers see its age. Beyond `rules.evidence_max_age` + 1, seeds may have to wait for gate G5."""

    promise: PromiseSettings | None = None
    """Measure what every blueprint promises in every free slot, which controllers then see; null: nobody does, unless
    the controller goes by it."""

    def require_measurements(self, horizon: int) -> None:
        """Raise ValueError unless every slot is measured within an episode of that many decisions, and promises are."""
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
        """The slots, of S, whose counterfactuals are measured after the decision of that number, ``[E]``: ``[E, S]``.

        It hangs on each network's own decisions alone, never on its neighbours'.
        """
        return (decision[:, None] + np.arange(slots)) % self.counterfactual_every == 0

    def find_stalled(self, plateau_age: Floats, table: SeedTable) -> Bools:
        """``[E]``: the networks that end on a plateau, after that many decisions without an improvement, ``[E]``."""
        if self.plateau is None:
            return np.zeros(len(plateau_age), np.bool_)
        return (plateau_age >= self.plateau) & ~table.live.any(axis=1)
