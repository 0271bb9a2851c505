"""Compose actions for many networks: the first wish that is legal becomes the action."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Actions
from esper.lifecycle.actions import Head, Op, wait
from esper.lifecycle.legality import ActionMasks

Bools = NDArray[np.bool_]


class Decisions:
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

    def germinate(self, slot: NDArray[np.int64], blueprint: NDArray[np.int64], wanted: Bools) -> None:
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
        self.actions[rows, Head.ALPHA_TARGET] = _last(self._masks.germination_target[rows])
        self.open[rows] = False


def _last(legal: Bools) -> NDArray[np.int64]:
    """Index of the last True column of each row."""
    return legal.shape[1] - 1 - legal[:, ::-1].argmax(1)
