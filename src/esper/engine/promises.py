"""The newest measurement of promise in each network's episode; `esper.growth.promise` defines promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.numerics.arrays import Bools, Floats, Ints
from esper.serialization.state_files import from_plain, to_plain


class PromiseSettings(Settings):
    """How often promises of all blueprints in all slots are measured, and which values controllers observe."""

    every: int = Field(default=8, ge=1, le=1000)
    """Decisions between measurements. In between the last one is used, and controllers observe its age."""
    first: int = Field(default=2, ge=1, le=1000)
    """Decisions before the first measurement, since for an untrained network every blueprint looks promising."""
    examples: int = Field(default=128, ge=2, le=100_000)
    """Maximum number of training examples per measurement: the newest since the last decision. The held-out promise is
    fitted on half of them."""
    shown: Literal["both", "fitted", "held_out"] = "both"
    """Which of the two promises controllers observe; the other one reads 0."""

    def is_due(self, decisions: Ints) -> Bools:
        """Whether networks are measured after ``decisions`` ``[E]`` decisions: bool ``[E]``."""
        since_first = decisions - self.first
        return (since_first >= 0) & (since_first % self.every == 0)


@dataclass(frozen=True)
class Promises:
    """What blueprints promise; NaN where a blueprint does not fit a slot, or the slot was not measured."""

    fitted: Floats
    """``[E, S, K]``."""
    held_out: Floats
    """``[E, S, K]``: mean over both halves."""
    missing: Bools
    """``[E]``: networks of which too little is known to measure anything; they stay due."""


class PromiseRecord:
    """The newest promises ``[E, S, K]`` of E networks with S slots and K blueprints; NaN where none was measured."""

    def __init__(self, environments: int, slots: int, blueprints: int, settings: PromiseSettings) -> None:
        self.settings = settings
        shape = environments, slots, blueprints
        self.fitted: Floats = np.full(shape, np.nan)
        self.held_out: Floats = np.full(shape, np.nan)
        self.age: Floats = np.full(environments, np.inf)
        """Decisions since the last measurement, ``[E]``."""
        self.change: Floats = np.zeros(environments)
        """Change of `best` from the measurement before to the last one, ``[E]``."""

    def restart(self, rows: Bools) -> None:
        """Reset the networks ``rows``, bool ``[E]``."""
        self.fitted[rows] = self.held_out[rows] = np.nan
        self.age[rows] = np.inf
        self.change[rows] = 0

    def advance_age(self, rows: Bools) -> None:
        """Count a decision of the networks ``rows``, bool ``[E]``."""
        self.age = self.age + rows

    def record(self, rows: Bools, fitted: Floats, held_out: Floats) -> None:
        """Store the promises just measured, ``[E, S, K]`` each, of the networks ``rows``, bool ``[E]``."""
        # The change of the best promise is only defined from the second measurement on.
        measured_before = np.isfinite(self.age) & rows
        before = self.best
        # A figure that controllers must not see is stored as 0.
        shown = self.settings.shown
        self.fitted[rows] = np.where(np.isnan(fitted[rows]) | (shown != "held_out"), fitted[rows], 0.0)
        self.held_out[rows] = np.where(np.isnan(held_out[rows]) | (shown != "fitted"), held_out[rows], 0.0)
        self.age = np.where(rows, 0.0, self.age)
        self.change = np.where(measured_before, self.best - before, np.where(rows, 0.0, self.change))

    @property
    def best(self) -> Floats:
        """The largest promise of each network, ``[E]``: held out, unless that is hidden."""
        figures = self.fitted if self.settings.shown == "fitted" else self.held_out
        return find_largest(figures, (1, 2))

    def state_dict(self) -> dict[str, Any]:
        """All attributes but the settings, as plain values."""
        return to_plain(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(from_plain(self._arrays, state, "promises"))

    @property
    def _arrays(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if name != "settings"}


def find_largest(figures: Floats, axes: int | tuple[int, ...]) -> Floats:
    """The largest of the measured figures over ``axes``; 0 where none was measured."""
    maximum = np.where(np.isnan(figures), -np.inf, figures).max(axes)
    return np.where(np.isfinite(maximum), maximum, 0.0)
