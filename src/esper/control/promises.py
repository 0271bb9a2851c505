"""What was found to be promised in each network's episode, and when: `esper.growth.promise` says what that is."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.numerics.arrays import Bools, Floats, Ints
from esper.serialization.state_files import from_plain, to_plain


class PromiseSettings(Settings):
    """How often it is measured what every blueprint promises in every slot, and what controllers see of it."""

    every: int = Field(default=8, ge=1, le=1000)
    """Decisions from one measurement to the next; in between the last one stands, and controllers see its age."""
    first: int = Field(default=2, ge=1, le=1000)
    """Periods of training, from one decision to the next, before the first measurement: what has learned nothing yet
    asks for anything."""
    examples: int = Field(default=128, ge=2, le=100_000)
    """Training examples that are asked: the newest ones since the last decision, or all of them where they are fewer.
    What is held out is fitted on half of them."""
    shown: Literal["both", "fitted", "held_out"] = "both"
    """Which of the two figures controllers see; the other one is 0 for them."""

    def is_due(self, decisions: Ints) -> Bools:
        """Who is measured after that many decisions, ``[E]``."""
        since = decisions - self.first
        return (since >= 0) & (since % self.every == 0)


class PromiseRecord:
    """The newest measurement of E networks with S slots and K blueprints; NaN where there is none."""

    def __init__(self, environments: int, slots: int, blueprints: int, settings: PromiseSettings) -> None:
        self.settings = settings
        shape = environments, slots, blueprints
        self.fitted: Floats = np.full(shape, np.nan)
        self.held_out: Floats = np.full(shape, np.nan)
        self.age: Floats = np.full(environments, np.inf)
        """Decisions since it was measured, ``[E]``."""
        self.change: Floats = np.zeros(environments)
        """Of the largest figure from the measurement before, ``[E]``."""

    def restart(self, rows: Bools) -> None:
        """Forget those of ``rows``, bool ``[E]``."""
        self.fitted[rows] = self.held_out[rows] = np.nan
        self.age[rows] = np.inf
        self.change[rows] = 0

    def advance_age(self, rows: Bools) -> None:
        """A decision of ``rows``, bool ``[E]``, has passed."""
        self.age = self.age + rows

    def record(self, rows: Bools, fitted: Floats, held_out: Floats) -> None:
        """What was measured now, ``[E, S, K]`` each, counts for ``rows``, bool ``[E]``."""
        measured = np.isfinite(self.age) & rows
        before = self.best
        shown = self.settings.shown
        self.fitted[rows] = fitted[rows] if shown != "held_out" else _hide(fitted[rows])
        self.held_out[rows] = held_out[rows] if shown != "fitted" else _hide(held_out[rows])
        self.age = np.where(rows, 0.0, self.age)
        self.change = np.where(measured, self.best - before, np.where(rows, 0.0, self.change))

    @property
    def best(self) -> Floats:
        """The most that is promised anywhere, ``[E]``, held out unless that is hidden."""
        figures = self.fitted if self.settings.shown == "fitted" else self.held_out
        return find_largest(figures, (1, 2))

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, as plain values."""
        return to_plain(self._known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` gave.

        Raises:
            CheckpointError: it is of episodes of another shape.
        """
        vars(self).update(from_plain(self._known, state, "promises"))

    @property
    def _known(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if name != "settings"}


def find_largest(figures: Floats, axes: int | tuple[int, ...]) -> Floats:
    """Over ``axes``, of what is known; 0 where nothing is."""
    most = np.where(np.isnan(figures), -np.inf, figures).max(axes)
    return np.where(np.isfinite(most), most, 0.0)


def _hide(figures: Floats) -> Floats:
    return np.where(np.isnan(figures), np.nan, 0.0)
