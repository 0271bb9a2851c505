"""Settings of the lifecycle (waiting times, tolerances, allowed choices), and the gates between its stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Self, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, field_validator, model_validator

from esper.config.settings import Settings
from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve, Head, Op
from esper.lifecycle.stages import Stage, make_stage_lookup
from esper.lifecycle.table import SeedMeasurements, SeedTable
from esper.numerics.arrays import Bools, Int8s


class Isolation(StrEnum):
    """How a seed learns before it counts in the forward pass."""

    NONE = "none"
    """No isolation: it blends one step after it germinated, and trains together with the host."""
    SHADOW = "shadow"
    """A second pass trains only the seed, at full alpha on a frozen host, until it is advanced. This does not affect
    the host, except by clipping the gradient norm over all parameters, which includes the seed's gradient."""


def _accept_names(kind: type[IntEnum]) -> BeforeValidator:
    """A validator that accepts the name of a member, such as ``germinate``, for its number."""
    names = {member.name.lower(): member for member in kind}

    def find_member(value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lower() not in names:
            raise ValueError(f"'{value}' is not one of {', '.join(names)}")
        return names[value.lower()]

    return BeforeValidator(find_member)


def _write_name(member: IntEnum) -> str:
    return member.name.lower()


OpName: TypeAlias = Annotated[Op, _accept_names(Op), PlainSerializer(_write_name)]
BlendName: TypeAlias = Annotated[Blend, _accept_names(Blend), PlainSerializer(_write_name)]
CurveName: TypeAlias = Annotated[Curve, _accept_names(Curve), PlainSerializer(_write_name)]
Steps: TypeAlias = Annotated[int, Field(ge=1, le=1000)]


class Rules(Settings):
    """Lifecycle rules: allowed operations on seeds, and their timing. Times are in steps (decisions).

    The defaults allow the choices that matter in short episodes. Different ramps and curves made no measurable
    difference. A short cooldown leaves time for another attempt.
    """

    isolation: Isolation = Isolation.NONE
    """How a seed trains before it affects the output: `shadow`, alone during TRAINING; `none`, not at all."""
    cooldown: tuple[Steps, Steps, Steps] = (1, 1, 1)
    """Steps in PRUNED, EMBARGOED and RESETTING before a slot is DORMANT again."""
    min_training_steps: Steps = 3
    """Minimum steps in TRAINING before a seed may advance (gate G2)."""
    measurement_max_age: int = Field(default=2, ge=0, le=1000)
    """Maximum age of a measured contribution, in steps (gate G5)."""
    harm_tolerance: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Maximum loss of score by a seed that may still be fossilized (gate G5), in units of contributions: 0.01 is one
    percentage point of accuracy, or 1% of the loss."""
    operations: tuple[OpName, ...] = (Op.WAIT, Op.GERMINATE, Op.FOSSILIZE, Op.PRUNE)
    """Allowed operations. `wait` is required; so is `advance` with isolation. `set_alpha` requires several alpha
    targets."""
    blends: tuple[BlendName, ...] = Field(default=(Blend.ADD,), min_length=1)
    """Allowed blends. A seed gets one when it germinates and keeps it."""
    tempos: tuple[int, ...] = Field(default=(3,), min_length=1)
    """Allowed numbers of steps to full alpha: a subset of 3, 5, 8."""
    alpha_targets: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    """Allowed alpha targets: a subset of 0.5, 0.7, 1."""
    alpha_speeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Allowed numbers of steps for a change of alpha: a subset of 0, 3, 5, 8."""
    alpha_curves: tuple[CurveName, ...] = Field(default=(Curve.LINEAR,), min_length=1)
    """Allowed curves for a change of alpha."""

    @field_validator("operations")
    @classmethod
    def _require_wait(cls, operations: tuple[Op, ...]) -> tuple[Op, ...]:
        if Op.WAIT not in operations:
            raise ValueError("operations must contain 'wait': a controller always needs one legal choice")
        return operations

    @field_validator("tempos", "alpha_targets", "alpha_speeds")
    @classmethod
    def _check_choices(cls, values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        choices = {"tempos": TEMPOS, "alpha_targets": ALPHA_TARGETS, "alpha_speeds": ALPHA_SPEEDS}[str(info.field_name)]
        unknown = [value for value in values if value not in choices]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(map(str, choices))}")
        return values

    @model_validator(mode="after")
    def _require_advance(self) -> Self:
        if self.isolation is not Isolation.NONE and Op.ADVANCE not in self.operations:
            raise ValueError(
                f"with isolation {self.isolation}, only operation advance ends TRAINING: "
                f"add advance to operations ({', '.join(map(_write_name, self.operations))})"
            )
        return self

    @model_validator(mode="after")
    def _require_alpha_targets(self) -> Self:
        if Op.SET_ALPHA in self.operations and len(set(self.alpha_targets)) == 1:
            raise ValueError(
                f"operation set_alpha is never legal, because {self.alpha_targets[0]:g} is the only alpha target: "
                "add another to alpha_targets, or remove set_alpha from operations"
            )
        return self

    @property
    def closed_heads(self) -> frozenset[Head]:
        """The heads for which these rules leave a single choice, whatever the state of the seeds."""
        choices: dict[Head, tuple[object, ...]] = {
            Head.BLEND: self.blends,
            Head.TEMPO: self.tempos,
            Head.ALPHA_TARGET: self.alpha_targets,
            Head.ALPHA_SPEED: self.alpha_speeds,
            Head.ALPHA_CURVE: self.alpha_curves,
        }
        return frozenset(head for head, allowed in choices.items() if len(set(allowed)) == 1)

    def narrow(self, known: Rules) -> Rules:
        """These rules without the choices that ``known`` lacks; where no choice would be left, all of them stay."""
        if self == known:
            return self
        changes: dict[str, tuple[object, ...]] = {}
        for kind in ("blends", "tempos", "alpha_targets", "alpha_speeds", "alpha_curves"):
            allowed: tuple[object, ...] = getattr(self, kind)
            changes[kind] = tuple(choice for choice in allowed if choice in getattr(known, kind)) or allowed
        operations = {*known.operations, Op.WAIT}
        if self.isolation is not Isolation.NONE:
            operations.add(Op.ADVANCE)  # nothing else ends training in isolation
        if len(set(changes["alpha_targets"])) == 1:
            operations.discard(Op.SET_ALPHA)
        changes["operations"] = tuple(op for op in self.operations if op in operations)
        return Rules.model_validate({**dict(self), **changes})


GATES: dict[Stage, str] = {Stage.GERMINATED: "G1", Stage.TRAINING: "G2", Stage.BLENDING: "G3", Stage.HOLDING: "G5"}
"""The gate ahead of a slot, by its stage."""
_GUARDED = make_stage_lookup(tuple(GATES))


class Reason(IntEnum):
    """Why a gate is open or closed."""

    NO_GATE = 0
    """There is no gate ahead of this stage, or the transition needs none."""
    PASSED = 1
    NOT_PROBED = 2
    """G1: the seed was not probed, or the probe was not finite."""
    TOO_YOUNG = 3
    """G2: the seed has not trained for long enough."""
    GRADIENT_UNHEALTHY = 4
    """G2: the seed's gradient was not measured, or vanished or exploded in too many minibatches."""
    ALPHA_MOVING = 5
    """G3: alpha is not yet at its target."""
    NOT_MEASURED = 6
    """G5: the seed's contribution is unknown."""
    STALE = 7
    """G5: the contribution was measured too long ago."""
    HARMFUL = 8
    """G5: the network does better without the seed."""


@dataclass(frozen=True)
class GateResults:
    """Whether the gate ahead of every slot is open, and why."""

    passed: Bools
    """Whether the gate is open, ``[E, S]``."""
    reason: Int8s
    """A `Reason`, ``[E, S]``."""


def evaluate_gates(table: SeedTable, measurements: SeedMeasurements, rules: Rules) -> GateResults:
    """Whether the gate ahead of each slot is open, as in `GATES`; the first condition that fails is its reason.

    G1 is before BLENDING or TRAINING, G2 before BLENDING, G3 before HOLDING, G5 before FOSSILIZED.
    """
    # In the order in which failures are reported.
    conditions = (
        (Stage.GERMINATED, measurements.probed, Reason.NOT_PROBED),
        (Stage.TRAINING, table.stage_age >= rules.min_training_steps, Reason.TOO_YOUNG),
        (Stage.TRAINING, measurements.gradient_healthy, Reason.GRADIENT_UNHEALTHY),
        (Stage.BLENDING, table.arrived, Reason.ALPHA_MOVING),
        (Stage.HOLDING, ~np.isnan(measurements.contribution), Reason.NOT_MEASURED),
        (Stage.HOLDING, measurements.contribution_age <= rules.measurement_max_age, Reason.STALE),
        (Stage.HOLDING, measurements.contribution >= -rules.harm_tolerance, Reason.HARMFUL),
    )
    reason = np.where(_GUARDED[table.stage], np.int8(Reason.PASSED), np.int8(Reason.NO_GATE))
    # In reverse, so that the first failure of a gate overwrites later ones.
    for stage, holds, failure in reversed(conditions):
        reason[(table.stage == stage) & ~holds] = failure
    return GateResults(passed=reason == Reason.PASSED, reason=reason)
