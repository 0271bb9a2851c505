"""Open-loop controllers: what germinates where and when is fixed beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Actions
from esper.control.reading import Reading
from esper.control.rules.decisions import Decisions
from esper.control.spaces import Observation
from esper.lifecycle.actions import Op
from esper.lifecycle.legality import ActionMasks


@dataclass(frozen=True)
class Planting:
    """Germinate ``blueprint`` in ``slot`` (both as indices) at decision ``step`` or as soon after as is legal."""

    step: int
    slot: int
    blueprint: int


class Schedule:
    """Carries out a list of plantings and keeps whatever may be kept: it advances and fossilizes as the gates allow.

    ``keep_after``: decisions a seed is held before it is fossilized.
    """

    def __init__(
        self, plantings: Sequence[Planting], horizon: int, name: str = "schedule", keep_after: int = 1
    ) -> None:
        self.name = name
        self.plantings = tuple(plantings)
        self._horizon = horizon
        self._keep_age = keep_after / horizon

    def start(self, seeds: Sequence[int]) -> NDArray[np.bool_]:
        """Which plantings are done, ``[E, number of plantings]``."""
        return np.zeros((len(seeds), len(self.plantings)), np.bool_)

    def act(
        self, observation: Observation, masks: ActionMasks, state: NDArray[np.bool_]
    ) -> tuple[Actions, NDArray[np.bool_]]:
        """The first planting that is due, else advance, else fossilize, else wait."""
        reading, decisions, done = Reading(observation), Decisions(masks), state.copy()
        step = np.rint(reading.network("progress") * self._horizon)
        everyone = np.ones(len(step), np.int64)
        for index, planting in enumerate(self.plantings):
            due = (step >= planting.step) & ~done[:, index] & decisions.open
            if due.any():
                decisions.germinate(everyone * planting.slot, everyone * planting.blueprint, due)
                done[:, index] |= due & ~decisions.open
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        held = reading.slot("stage_holding") > 0
        decisions.act_on(Op.FOSSILIZE, held & (reading.slot("stage_age") >= self._keep_age - 1e-6))
        return decisions.actions, done
