"""The look-ahead rule of release 0.2, which the present one is compared with.

    python benchmarks/foreign.py FOLDER --controller benchmarks/former_rule.py:FormerLook

It plants one seed at a time, prefers small ones, and keeps what contributes two points of accuracy more than its rent,
or two hundredths of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esper.control.controller import Actions, CandidateRating
from esper.control.rules import ROUNDING, ActionBuilder, count_unfinished_seeds, keep_or_prune, rate_seeds
from esper.engine.observation import FeatureReader, Observation
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import Figures, SeedRating

FITTED, PRICE, THRESHOLD = 0.75, 0.05, 0.05
"""Weight of the fitted promise, what ``log1p`` of the relative size takes from it, and what must be left of it."""
MARGIN = 0.02
"""What a seed must contribute beyond its rent."""
PROBATION, STOP_AFTER, LOOKS = 3, 0.75, 3
"""Decisions on probation, the share of the episode after which nothing is planted, and looks until then."""


class FormerLook:
    """Plants the best candidate by its promise less its price, one at a time, and judges it after its probation."""

    name = "former_look"

    def __init__(self, horizon: int) -> None:
        # In a short growth the probation is shorter, and looks come earlier and more often.
        self._horizon, self._probation = horizon, min(PROBATION, max(horizon // 4, 1))
        needed = 1 + 1 + 3 + self._probation + 1
        self._stop_after = min(STOP_AFTER, max(horizon - needed, horizon // 3) / horizon)
        latest = max(int(self._stop_after * horizon + ROUNDING), 1)
        first = min(PromiseSettings().first, latest)
        self.promise = PromiseSettings(first=first, every=min(8, max((latest - first) // (LOOKS - 1), 1)))

    def start(self, seeds: Sequence[int]) -> None:
        """It has no state."""

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
        """The rating of every seed."""
        return rate_seeds(FeatureReader(observation), MARGIN)

    def rate_candidates(self, observation: Observation) -> CandidateRating:
        """What is left of the promise of every candidate after its price."""
        features = FeatureReader(observation)
        fitted, held_out = features.blueprint("promise"), features.blueprint("promise_held_out")
        worth = FITTED * fitted + (1 - FITTED) * held_out - PRICE * features.blueprint("cost")
        worth = np.where((fitted != 0) | (held_out != 0), worth, -np.inf)
        return CandidateRating(worth, THRESHOLD, rank=worth)

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        features, decisions = FeatureReader(observation), ActionBuilder(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, features, self._probation / self._horizon, self.rate_seeds(observation))

        early = features.network("progress") <= self._stop_after + ROUNDING
        due = early & (features.network("promise_age") == 0) & (count_unfinished_seeds(features) == 0)
        possible = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None] & (features.blueprint("tries") == 0)
        worth = np.where(possible, self.rate_candidates(observation).worth, -np.inf)
        slot, blueprint = np.divmod(worth.reshape(len(worth), -1).argmax(1), worth.shape[2])
        enough = worth[np.arange(len(worth)), slot, blueprint] > THRESHOLD
        decisions.germinate(slot, blueprint, enough & due)
        return decisions.actions, None
