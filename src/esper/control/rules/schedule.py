"""Controllers that grow by the clock: a fixed schedule, at once or on a plateau, or a new seed every few decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.control.controller import Actions
from esper.control.observation import LONGEST_PLATEAU, FeatureReader, Observation
from esper.control.rules.decisions import ROUNDING, ActionBuilder, keep_or_prune
from esper.errors import ConfigError
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks
from esper.numerics.arrays import Bools, Ints


@dataclass(frozen=True)
class Planting:
    """Germinate ``blueprint`` in ``slot`` (both as indices) at decision ``step`` or as soon after as is legal."""

    step: int
    slot: int
    blueprint: int


class Schedule:
    """Carries out a list of plantings and keeps whatever may be kept: it advances and fossilizes as the gates allow.

    ``keep_after``: decisions a seed is held before it is fossilized. ``patience``: decisions without progress
    (`History.plateau_age`) before the first planting, as many as are told apart at most; 0: none is waited for.
    ``latest``: once more than that share of the growth is over, no plateau is waited for.

    Raises:
        ConfigError: the patience is out of range.
    """

    def __init__(
        self,
        plantings: Sequence[Planting],
        horizon: int,
        name: str = "schedule",
        keep_after: int = 1,
        patience: float = 0,
        latest: float = 1.0,
    ) -> None:
        if not 0 <= patience <= LONGEST_PLATEAU:
            raise ConfigError(f"patience {patience:g} must be from 0 to {LONGEST_PLATEAU:g} decisions")
        self.name, self.patience = name, patience
        self.plantings = tuple(plantings)
        self._horizon = horizon
        self._keep_age = keep_after / horizon
        self._latest = latest

    def start(self, seeds: Sequence[int]) -> Bools:
        """Which plantings are done, ``[E, number of plantings]``."""
        return np.zeros((len(seeds), len(self.plantings)), np.bool_)

    def act(self, observation: Observation, masks: ActionMasks, state: Bools) -> tuple[Actions, Bools]:
        """The first planting that is due, else advance, else fossilize, else wait."""
        reading, decisions, done = FeatureReader(observation), ActionBuilder(masks), state.copy()
        progress = reading.network("progress")
        step = np.rint(progress * self._horizon)
        everyone = np.ones(len(step), np.int64)
        waited = reading.network("plateau_age") * LONGEST_PLATEAU >= self.patience - ROUNDING
        begun = done.any(axis=1) | waited | (progress > self._latest + ROUNDING)
        for index, planting in enumerate(self.plantings):
            due = begun & (step >= planting.step) & ~done[:, index] & decisions.open
            if due.any():
                decisions.germinate(everyone * planting.slot, everyone * planting.blueprint, due)
                done[:, index] |= due & ~decisions.open
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        held = reading.slot("stage_holding") > 0
        decisions.act_on(Op.FOSSILIZE, held & (reading.slot("stage_age") >= self._keep_age - ROUNDING))
        return decisions.actions, done


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

    def start(self, seeds: Sequence[int]) -> Ints:
        """The clock of each network and how many plantings it has had, ``[2, E]``."""
        return np.stack([np.full(len(seeds), -1), np.zeros(len(seeds), np.int64)])

    def act(self, observation: Observation, masks: ActionMasks, state: Ints) -> tuple[Actions, Ints]:
        """Advance what may be, else judge what is due, else plant if the clock says so, else wait.

        The clock is the number of the decision as progress tells it; where progress stands still, it goes on.
        """
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        progress = reading.network("progress")
        before, planted = state
        clock = np.maximum(np.rint(progress * self._horizon).astype(np.int64), before + 1)
        due = (clock >= planted * settings.period) & (progress <= settings.stop_after)
        plantings = np.array(settings.plantings, np.int64)[planted % len(settings.plantings)]
        unsettled = decisions.open.copy()
        decisions.germinate(plantings[:, 0], plantings[:, 1], due)
        return decisions.actions, np.stack([clock, planted + (unsettled & ~decisions.open)])
