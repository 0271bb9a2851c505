"""The rule that looks: plant what promises most, keep it if it earns its rent, and stop when nothing promises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.control.controller import Actions
from esper.control.observation import FeatureReader, Observation
from esper.control.promises import PromiseSettings
from esper.control.rules.decisions import ROUNDING, ActionBuilder, count_unfinished, keep_or_prune
from esper.errors import ConfigError
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks
from esper.numerics.arrays import Bools, Floats, Ints


class LookSettings(Settings):
    """When it plants, and how long it tries. One set for every host, found on the token suite's training instances."""

    promise: PromiseSettings = PromiseSettings()
    """How it looks."""
    fitted: float = Field(default=0.75, ge=0, le=1)
    """Weight of the fitted promise; the held-out one has the rest."""
    price: float = Field(default=0.05, ge=0, le=10)
    """What ``log1p(parameters / host parameters)`` of a candidate takes from its promise."""
    threshold: float = Field(default=0.05, ge=-1, le=1)
    """What must be left of a promise for a seed to be planted."""
    trial: int = Field(default=3, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.02, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.75, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""


class LookRule:
    """Has no preferences: it goes by what is measured of this network, before a seed is planted and after."""

    name = "look"

    def __init__(self, settings: LookSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon
        self.promise: PromiseSettings | None = settings.promise

    def start(self, seeds: Sequence[int]) -> None:
        """No state: all it needs to remember is in the observation."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network.

        Raises:
            ConfigError: nobody measured what is promised.
        """
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        if not reading.shows_promise:
            raise ConfigError("controller 'look' goes by what blueprints promise: set conduct.promise")
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        slot, blueprint, found = self._most_promising(reading, masks)
        decisions.germinate(slot, blueprint, found & self._may_plant(reading))
        return decisions.actions, None

    def _may_plant(self, reading: FeatureReader) -> Bools:
        """One at a time, and only by what was measured just now: an older promise is of another network."""
        early = reading.network("progress") <= self._settings.stop_after + ROUNDING
        return early & (reading.network("promise_age") == 0) & (count_unfinished(reading) == 0)

    def _most_promising(self, reading: FeatureReader, masks: ActionMasks) -> tuple[Ints, Ints, Bools]:
        """The legal and untried candidate with the most promise less its price: slot, blueprint, whether it is enough.

        A promise of exactly 0 was not measured, or is of what no step can help.
        """
        settings, fitted, held_out = self._settings, reading.blueprint("promise"), reading.blueprint("promise_held_out")
        worth: Floats = settings.fitted * fitted + (1 - settings.fitted) * held_out
        worth = worth - settings.price * reading.blueprint("cost")
        possible = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None] & (reading.blueprint("tries") == 0)
        flat = np.where(possible & ((fitted != 0) | (held_out != 0)), worth, -np.inf).reshape(len(worth), -1)
        best = flat.argmax(1)
        enough = flat[np.arange(len(best)), best] > settings.threshold
        return *np.divmod(best, worth.shape[2]), enough
