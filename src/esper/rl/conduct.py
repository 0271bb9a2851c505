"""How episodes are conducted: who watches over them, what growth may cost, and when they end early."""

from __future__ import annotations

from pydantic import Field

from esper.settings import Settings
from esper.training.budget import Budget
from esper.training.governor import GovernorSettings


class Conduct(Settings):
    """Settings of episodes beside the lifecycle's rules."""

    governor: GovernorSettings | None = GovernorSettings()
    """Rolls networks back when training blows up; null: nobody does."""
    budget: Budget = Budget()
    """Caps on what growth may cost."""
    plateau: int | None = Field(default=None, ge=1, le=1000)
    """Decisions without an improvement of the validation loss after which an episode ends, unless a seed is still
    unfinished; null: episodes go on to their horizon."""


DEFAULT_CONDUCT = Conduct()
"""A governor, no caps, and every episode to its horizon."""
