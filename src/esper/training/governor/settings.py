"""When a governor steps in, and how often."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from esper.settings import Settings


class GovernorSettings(Settings):
    """Parameters of the detectors of trouble. A *check* is one look at a network: in a population, one decision.

    Skill is 0 for guessing and 1 for perfection: ``(accuracy - chance) / (1 - chance)``.
    """

    window: int = Field(default=8, ge=2, le=1000)
    """Checks whose losses make up what is usual."""
    fewest: int = Field(default=3, ge=2, le=1000)
    """Losses that must be known before one can be unusual; at most the window."""
    sigmas: float = Field(default=4.0, gt=0)
    """A loss is unusual beyond the mean plus this many standard deviations of the window ..."""
    multiple: float = Field(default=2.0, gt=1)
    """... and beyond this multiple of the mean."""
    patience: int = Field(default=3, ge=1, le=1000)
    """Checks in a row with an unusual loss, or at the level of guessing, before a network is in trouble; what is not
    finite is trouble at once."""
    good_sigmas: float = Field(default=1.0, ge=0)
    """Vitals are good, and a snapshot is taken, up to the mean plus this many standard deviations."""
    lead: float = Field(default=0.25, gt=0, le=1)
    """Skill that a network must have had before it can collapse."""
    collapsed: float = Field(default=0.05, ge=0, lt=1)
    """Skill at or below which it then counts as guessing."""
    max_rollbacks: int = Field(default=3, ge=0)
    """Rollbacks in one episode. Trouble after the last one ends the episode, in the state of the last snapshot."""
    penalty: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """What each trouble costs in reward, in units of the objective."""

    @model_validator(mode="after")
    def _losses_become_known(self) -> Self:
        if self.fewest > self.window:
            raise ValueError(
                f"no loss can ever be unusual: {self.fewest} must be known, but a window holds {self.window}; "
                "lower fewest or raise window"
            )
        return self
