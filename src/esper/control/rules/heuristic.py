"""The hand-written rule: on a plateau try the best guess, keep it if it earns more than its rent, else prune it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from esper.config.settings import Settings
from esper.control.controller import Actions
from esper.control.observation import LONGEST_PLATEAU, MOST_TRIES, FeatureReader, Observation
from esper.control.rules.decisions import ROUNDING, ActionBuilder, count_unfinished, keep_or_prune
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks
from esper.numerics.arrays import Bools, Ints


class HeuristicSettings(Settings):
    """Thresholds of the rule, and its guesses."""

    preferences: tuple[tuple[int, int], ...] = ((0, 0),)
    """Slot and blueprint indices, most promising first. What was tried before comes last."""
    patience: float = Field(default=0.0, ge=0, le=10)
    """Decisions without progress (`History.plateau_age`) before a seed germinates; 0: at once."""
    at_a_time: int = Field(default=2, ge=1, le=100)
    """Unfinished seeds a network may have."""
    most: int = Field(default=3, ge=1, le=100)
    """Seeds a network may have, kept ones included."""
    trial: int = Field(default=6, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""
    narrowest: float = Field(default=0.0, ge=0, le=1)
    """A slot is tried only if its width is at least this share of the network's widest slot."""


class Heuristic:
    """Looks at all slots of a network: advances and judges seeds as their gates allow, and germinates on plateaus."""

    name = "heuristic"

    def __init__(self, settings: HeuristicSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon

    def start(self, seeds: Sequence[int]) -> None:
        """No state: all it needs to remember is in the observation."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        slot, blueprint, found = self._best_guess(reading, masks)
        decisions.germinate(slot, blueprint, found & self._may_try(reading))
        return decisions.actions, None

    def _may_try(self, reading: FeatureReader) -> Bools:
        settings = self._settings
        unfinished, fossils = count_unfinished(reading), reading.slot("stage_fossilized").sum(1)
        stuck = reading.network("plateau_age") * LONGEST_PLATEAU >= settings.patience - ROUNDING
        few = (unfinished < settings.at_a_time) & (unfinished + fossils < settings.most)
        return stuck & few & (reading.network("progress") <= settings.stop_after)

    def _best_guess(self, reading: FeatureReader, masks: ActionMasks) -> tuple[Ints, Ints, Bools]:
        """The first preference that is legal, wide enough and tried least: slot, blueprint, whether there is one."""
        preferences = np.array(self._settings.preferences, np.int64)
        slots, blueprints = preferences[:, 0], preferences[:, 1]
        widths = np.exp(reading.slot("log_width"))
        wide = widths >= self._settings.narrowest * widths.max(1, keepdims=True) - ROUNDING
        possible = masks.blueprint[:, slots, blueprints] & masks.slot[:, Op.GERMINATE][:, slots] & wide[:, slots]
        tried = reading.blueprint("tries")[:, slots, blueprints]
        rank = np.where(possible, np.rint(tried * MOST_TRIES) * len(preferences) + np.arange(len(preferences)), np.inf)
        best = rank.argmin(1)
        return slots[best], blueprints[best], possible.any(1)
