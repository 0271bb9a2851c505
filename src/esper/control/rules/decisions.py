"""What rules share: composing actions for many networks, and keeping or pruning a seed by its contribution."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Actions
from esper.control.observation import FeatureReader
from esper.lifecycle.actions import Head, Op, wait
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.stages import LIVE
from esper.numerics.arrays import Bools, Float32s, Ints


class ActionBuilder:
    """Starts with WAIT everywhere; each call settles some of the networks that are still open."""

    def __init__(self, masks: ActionMasks) -> None:
        self._masks = masks
        self.actions: Actions = wait(masks.environments)
        self.open: Bools = np.ones(masks.environments, np.bool_)

    def act_on(self, op: Op, wanted: Bools) -> None:
        """Do ``op`` (FOSSILIZE, PRUNE at once, or ADVANCE) in the first slot that is ``wanted``, bool ``[E, S]``."""
        possible = wanted & self._masks.slot[:, op] & self.open[:, None]
        rows = np.flatnonzero(possible.any(axis=1))
        self.actions[rows, Head.OP] = op
        self.actions[rows, Head.SLOT] = possible[rows].argmax(1)
        if op is Op.PRUNE:
            self.actions[rows, Head.ALPHA_SPEED] = self._masks.alpha_speed[rows].argmax(1)
            self.actions[rows, Head.ALPHA_CURVE] = self._masks.alpha_curve[rows].argmax(1)
        self.open[rows] = False

    def germinate(self, slot: Ints, blueprint: Ints, wanted: Bools) -> None:
        """Germinate ``blueprint[e]`` in ``slot[e]`` where ``wanted``: the fastest tempo, the largest alpha allowed.

        Tempos and targets are on offer in rising order.
        """
        everyone = np.arange(len(slot))
        possible = self._masks.slot[everyone, Op.GERMINATE, slot] & self._masks.blueprint[everyone, slot, blueprint]
        rows = np.flatnonzero(wanted & possible & self.open)
        self.actions[rows, Head.OP] = Op.GERMINATE
        self.actions[rows, Head.SLOT] = slot[rows]
        self.actions[rows, Head.BLUEPRINT] = blueprint[rows]
        self.actions[rows, Head.BLEND] = self._masks.blend[rows].argmax(1)
        self.actions[rows, Head.TEMPO] = self._masks.tempo[rows].argmax(1)
        self.actions[rows, Head.ALPHA_TARGET] = _find_last(self._masks.germination_target[rows])
        self.open[rows] = False


def _find_last(legal: Bools) -> Ints:
    """Index of the last True column of each row."""
    return legal.shape[1] - 1 - legal[:, ::-1].argmax(1)


Numbers: TypeAlias = NDArray[Any]
"""Of any precision."""

ROUNDING = 1e-6
"""Ages are shares of the episode in float32."""


def count_unfinished(reading: FeatureReader) -> Float32s:
    """How many unfinished seeds each network has, ``[E]``."""
    return np.sum([reading.slot(f"stage_{stage.name.lower()}") for stage in LIVE], axis=(0, 2))


def seed_rent(reading: FeatureReader) -> Float32s:
    """The rent each resident seed adds to the network's, ``[E, S]``: what it would save to be without it."""
    cost = np.expm1(reading.slot("resident_cost"))
    total = np.expm1(reading.network("log_added_parameters"))
    return marginal_rent(reading.network("rent"), cost, total)


def marginal_rent(rent: Numbers, cost: Numbers, total: Numbers) -> Numbers:
    """What each seed adds to the rent ``rent * log1p(total)``, ``[E, S]``.

    ``rent`` and ``total``, the parameters of all seeds that count, are ``[E]``; ``cost``, those of each, ``[E, S]``;
    parameters are relative to the host's.
    """
    without = np.maximum(total[:, None] - cost, 0.0)
    return rent[:, None] * (np.log1p(without + cost) - np.log1p(without))


def keep_or_prune(decisions: ActionBuilder, reading: FeatureReader, trial: float, margin: float) -> None:
    """Fossilize the held seeds whose accuracy contribution exceeds their rent by ``margin``, prune the others.

    A seed is judged once its stage's age reaches ``trial``, a share of the episode, and something is known of it.
    """
    held = (reading.slot("stage_holding") > 0) & (reading.slot("measured") > 0)
    due = held & (reading.slot("stage_age") >= trial - ROUNDING)
    worth = reading.slot("accuracy_contribution") - seed_rent(reading) >= margin
    decisions.act_on(Op.FOSSILIZE, due & worth)
    decisions.act_on(Op.PRUNE, due & ~worth)
