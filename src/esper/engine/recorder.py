"""Events of a run that every growth has: verdicts of gates, changes of stage, and the state of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np

from esper.engine.gradients import HealthTable
from esper.lifecycle.rules import GATES, Reason, Verdicts
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.lifecycle.transitions import Cause, Transitions
from esper.numerics.arrays import Bools, Floats, Int8s
from esper.runs.events import Event, GateJudged, LifecycleTransition, NetworkStep

StepOf = Callable[[int], NetworkStep]
"""The first fields of an event, by the index of the network."""


@dataclass(frozen=True)
class StageChange:
    """A slot's change of stage, by names; ``step`` counts decisions from 0."""

    environment: int
    step: int
    slot: int
    before: str
    after: str
    blueprint: str | None
    cause: str
    reason: str


def list_stage_changes(transitions: Transitions, step: int, blueprints: Sequence[str]) -> list[StageChange]:
    """The changes of stage after one decision, by names, in order."""
    indices: list[int] = transitions.blueprint.tolist()
    return [
        StageChange(
            environment=int(transitions.env[index]),
            step=step,
            slot=int(transitions.slot[index]),
            before=Stage(transitions.before[index]).name.lower(),
            after=Stage(transitions.after[index]).name.lower(),
            blueprint=None if blueprint == NO_BLUEPRINT else blueprints[blueprint],
            cause=Cause(transitions.cause[index]).name.lower(),
            reason=Reason(transitions.reason[index]).name.lower(),
        )
        for index, blueprint in enumerate(indices)
    ]


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

    def record_verdicts(self, verdicts: Verdicts, stages: Int8s, running: Bools, step: StepOf) -> Iterator[Event]:
        """Gates whose verdict has changed, or that stand in the place of others, in the networks ``running [E]``."""
        reasons = verdicts.reason
        changed = (reasons != self.reasons) | (stages != self.judged_stages)
        self.reasons, self.judged_stages = reasons, stages
        for row, slot in np.argwhere(changed & (reasons != Reason.NO_GATE) & running[:, None]).tolist():
            reason, gate = Reason(reasons[row, slot]), GATES[Stage(stages[row, slot])]
            yield GateJudged(
                **step(row), slot=slot, gate=gate, passed=reason is Reason.PASSED, reason=reason.name.lower()
            )

    def record_transitions(
        self, changes: Transitions, contributions: Floats, running: Bools, step: StepOf
    ) -> Iterator[Event]:
        """Changes of stage in the networks ``running [E]``, with the last known ``contributions [E, S]``."""
        for change in list_stage_changes(changes, 0, self._blueprints):
            row, slot = change.environment, change.slot
            if not running[row]:
                continue  # cooldowns go on where an episode is over
            yield LifecycleTransition(
                **step(row),
                slot=slot,
                before=change.before,
                after=change.after,
                blueprint=change.blueprint,
                cause=change.cause,
                reason=change.reason,
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


class GradientFields(TypedDict):
    """The fields of a decision's event about the gradients of seeds, an entry per slot."""

    gradient_ratios: tuple[float | None, ...]
    vanished_shares: tuple[float | None, ...]
    exploded_shares: tuple[float | None, ...]


def describe_gradients(health: HealthTable, evidence: Evidence) -> list[GradientFields]:
    """The fields about gradients of each network, from a decision's minibatches and the evidence with them."""
    measured = evidence.gradient_weight > 0
    columns = [
        np.where(measured, figure, np.nan).tolist()
        for figure in (health.ratio, evidence.vanished_share, evidence.exploded_share)
    ]
    # Ratios range over many orders of magnitude, so what is kept are significant digits.
    ratios, vanished, exploded = (
        [replace_unmeasured([float(f"{value:.4g}") for value in row]) for row in column] for column in columns
    )
    return [
        GradientFields(gradient_ratios=ratio, vanished_shares=vanished_share, exploded_shares=exploded_share)
        for ratio, vanished_share, exploded_share in zip(ratios, vanished, exploded, strict=True)
    ]


def replace_unmeasured(values: Sequence[Any]) -> tuple[float | None, ...]:
    """The values, with None for those that were not measured."""
    return tuple(None if math.isnan(value) else value for value in values)
