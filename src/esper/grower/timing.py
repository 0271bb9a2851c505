"""When things happen in a growth of so many decisions, or of nobody knows how many."""

from __future__ import annotations

from dataclasses import dataclass

from esper.control.rules.heuristic import HeuristicSettings
from esper.errors import ConfigError
from esper.lifecycle.rules import Isolation, Rules

HORIZON = 100
"""Decisions in which controllers see times as shares, where nobody said how many there will be."""
MOST_PROGRESS = 0.5
"""Controllers are never told that more of these is over: until then every rule still plants."""
LONGEST_TRIAL = 4
"""A trial takes at most one part in so many of the horizon."""
LATEST_PLANTING = 3
"""In a short growth, seeds may germinate in one part in so many of it, whatever becomes of them by its end."""
_BEFORE_BLENDING = 1
"""Decisions after its germination at which a seed that nothing isolates begins to count."""
_BEFORE_END = 1
"""Decisions for which a seed should have counted at the end, so that it has learned with the host."""


@dataclass(frozen=True)
class Timing:
    """What controllers are told of time, and how their rules go by it.

    Args:
        planned: Decisions, or None: until somebody stops.
        rules: What may happen to seeds, and how fast.
    """

    planned: int | None
    rules: Rules

    @property
    def horizon(self) -> int:
        """Decisions of which controllers see shares."""
        return HORIZON if self.planned is None else self.planned

    def progress(self, decision: int) -> float:
        """The share of the growth that is over at the decision of that number, from 1, as controllers are told."""
        return min(decision / self.horizon, MOST_PROGRESS if self.planned is None else 1.0)

    @property
    def isolated(self) -> int:
        """Decisions for which a seed learns apart at least."""
        return 0 if self.rules.isolation is Isolation.NONE else self.rules.min_training_steps

    def require_growth(self) -> None:
        """Refuse a plan in which no seed could be planted, count and learn.

        Raises:
            ConfigError: it is one.
        """
        needed = 1 + self.isolated + _BEFORE_BLENDING + _BEFORE_END
        if self.horizon < needed:
            apart = f", after {self.isolated} in isolation {self.rules.isolation}" if self.isolated else ""
            raise ConfigError(
                f"{self.horizon} decisions are too few for anything to grow: a seed germinates, counts from the next "
                f"decision on{apart}, and must learn until another; plan at least {needed}, or choose controller 'none'"
            )

    @property
    def trial(self) -> int:
        """Decisions for which rules hold a seed before they judge it."""
        return min(HeuristicSettings().trial, max(self.horizon // LONGEST_TRIAL, 1))

    @property
    def stop_after(self) -> float:
        """The share of the growth after which rules plant nothing any more.

        Where there is time, every seed is judged after a full trial before the end. In a short growth the last ones
        are unfinished then, which `esper.Grower.finish` judges.
        """
        usual = HeuristicSettings()
        needed = 1 + self.isolated + _BEFORE_BLENDING + min(self.rules.tempos) + self.trial + usual.at_a_time
        latest = max(self.horizon - needed, (self.horizon - self.isolated) // LATEST_PLANTING)
        return min(usual.stop_after, latest / self.horizon)
