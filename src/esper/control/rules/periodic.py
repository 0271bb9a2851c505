"""Grow by the clock: a new seed every few decisions, judged after a fixed trial."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esper.control.controller import Actions
from esper.control.reading import Reading
from esper.control.rules.decisions import Decisions
from esper.control.rules.judging import judge
from esper.control.spaces import Observation
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks
from esper.settings import Settings


class PeriodicSettings(Settings):
    """When the clock strikes, and what it brings."""

    period: int = Field(default=2, ge=1, le=1000)
    """Decisions from one germination to the next."""
    plantings: tuple[tuple[int, int], ...] = ((0, 0),)
    """Slot and blueprint indices, germinated in this order, then again from the first."""
    trial: int = Field(default=6, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""


class Periodic:
    """Every ``period`` decisions the next planting whose slot is free; each seed is judged after its trial."""

    name = "periodic"

    def __init__(self, settings: PeriodicSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon

    def start(self, seeds: Sequence[int]) -> NDArray[np.int64]:
        """The clock of each network and how many plantings it has had, ``[2, E]``."""
        return np.stack([np.full(len(seeds), -1), np.zeros(len(seeds), np.int64)])

    def act(
        self, observation: Observation, masks: ActionMasks, state: NDArray[np.int64]
    ) -> tuple[Actions, NDArray[np.int64]]:
        """Advance what may be, else judge what is due, else plant if the clock says so, else wait.

        The clock is the number of the decision as progress tells it; where progress stands still, it goes on.
        """
        settings, reading, decisions = self._settings, Reading(observation), Decisions(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        judge(decisions, reading, settings.trial / self._horizon, settings.margin)
        progress = reading.network("progress")
        before, planted = state
        clock = np.maximum(np.rint(progress * self._horizon).astype(np.int64), before + 1)
        due = (clock >= planted * settings.period) & (progress <= settings.stop_after)
        plantings = np.array(settings.plantings, np.int64)[planted % len(settings.plantings)]
        unsettled = decisions.open.copy()
        decisions.germinate(plantings[:, 0], plantings[:, 1], due)
        return decisions.actions, np.stack([clock, planted + (unsettled & ~decisions.open)])
