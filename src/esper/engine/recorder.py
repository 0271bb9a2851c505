"""Events of a run that every growth has: verdicts of gates, changes of stage, and the state of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from esper.lifecycle.rules import GATES, Reason, Verdicts
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, SeedTable
from esper.lifecycle.transitions import Cause, Transitions
from esper.numerics.arrays import Bools, Floats, Int8s
from esper.runs.events import Event, GateJudged, LifecycleTransition, NetworkStep

PlaceOf = Callable[[int], Place]
"""The first fields of an event, by the index of the network."""


class LifecycleRecorder:
    """Makes events of what happens in the slots of E networks.

    Args:
        networks: E.
        slots: S.
        blueprints: Names by index.
    """

    def __init__(self, networks: int, slots: int, blueprints: Sequence[str]) -> None:
        self._blueprints = blueprints
        self.reasons: Int8s = np.full((networks, slots), Reason.NO_GATE, np.int8)
        """The latest `Reason` of the gate ahead of each slot, ``[E, S]``."""
        self.judged_stages: Int8s = np.full((networks, slots), Stage.DORMANT, np.int8)
        """The stages that they were of, ``[E, S]``."""

    def name_blueprint(self, blueprint: int) -> str | None:
        """Name of a blueprint by its index; None without one."""
        return None if blueprint == NO_BLUEPRINT else self._blueprints[blueprint]

    def record_verdicts(self, verdicts: Verdicts, before: SeedTable, running: Bools, place: PlaceOf) -> Iterator[Event]:
        """Gates whose verdict has changed, or that stand in the place of others, in the networks ``running [E]``."""
        reasons, stages = verdicts.reason, before.stage
        changed = (reasons != self.reasons) | (stages != self.judged_stages)
        self.reasons, self.judged_stages = reasons, stages
        for row, slot in np.argwhere(changed & (reasons != Reason.NO_GATE) & running[:, None]).tolist():
            reason, gate = Reason(reasons[row, slot]), GATES[Stage(stages[row, slot])]
            yield GateJudged(
                **place(row), slot=slot, gate=gate, passed=reason is Reason.PASSED, reason=reason.name.lower()
            )

    def record_transitions(
        self, changes: Transitions, contributions: Floats, running: Bools, place: PlaceOf
    ) -> Iterator[Event]:
        """Changes of stage in the networks ``running [E]``, with the last known ``contributions [E, S]``."""
        for index in range(len(changes)):
            row, slot = int(changes.env[index]), int(changes.slot[index])
            if not running[row]:
                continue  # cooldowns go on where an episode is over
            yield LifecycleTransition(
                **place(row),
                slot=slot,
                before=Stage(changes.before[index]).name.lower(),
                after=Stage(changes.after[index]).name.lower(),
                blueprint=self.name_blueprint(int(changes.blueprint[index])),
                cause=Cause(changes.cause[index]).name.lower(),
                reason=Reason(changes.reason[index]).name.lower(),
                contribution=replace_unmeasured([float(contributions[row, slot])])[0],
            )

    def describe_stages(self, table: SeedTable) -> list[tuple[str, ...]]:
        """Names of the stages of each network's slots."""
        return [
            tuple(Stage(stage).name.lower() for stage in row) for row in cast("list[list[int]]", table.stage.tolist())
        ]

    def describe_blueprints(self, table: SeedTable) -> list[tuple[str | None, ...]]:
        """Names of the blueprints in each network's slots; None for an empty one."""
        return [tuple(map(self.name_blueprint, row)) for row in cast("list[list[int]]", table.blueprint.tolist())]


def replace_unmeasured(values: Sequence[Any]) -> tuple[float | None, ...]:
    """The values, with None for those that were not measured."""
    return tuple(None if math.isnan(value) else value for value in values)
