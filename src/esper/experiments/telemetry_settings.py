"""What the run store keeps of the networks that a controller learns on."""

from __future__ import annotations

import math

from pydantic import Field

from esper.settings import Settings


class TelemetrySettings(Settings):
    """How fully is told what happens. None of it changes what does.

    Changes of stage, verdicts of gates, rollbacks and how episodes end are always kept, of all networks.
    """

    steps_every: int = Field(default=1, ge=0)
    """Iterations between those whose every decision is kept, with rewards and counterfactuals: half a kilobyte each.
    0: none."""
    watched: int = Field(default=4, ge=0)
    """Networks of which is kept what the policy saw and how likely it found each choice: some kilobytes per decision.
    They are spread evenly, and so over problems."""

    def tells_steps(self, iteration: int) -> bool:
        """Whether the decisions of that iteration, from 1, are kept."""
        return self.steps_every > 0 and (iteration - 1) % self.steps_every == 0

    def watched_of(self, environments: int) -> range:
        """Numbers of the watched ones of so many environments."""
        count = min(self.watched, environments)
        return range(0, environments, math.ceil(environments / count)) if count else range(0)
