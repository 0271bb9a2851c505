"""Settings of the lifecycle, the gates between its stages, and which actions are legal: masks, checks and repair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Self, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, field_validator, model_validator

from esper.config.settings import Settings
from esper.errors import IllegalActionError
from esper.lifecycle.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    CHOICES,
    RELEVANT,
    TEMPOS,
    Blend,
    Curve,
    Head,
    Op,
    clear_irrelevant_heads,
    count_choices,
)
from esper.lifecycle.table import LIVE, SeedMeasurements, SeedTable, Stage, make_stage_lookup
from esper.numerics.arrays import Bools, Int8s, Ints, map_arrays


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

_SETTINGS: dict[Head, tuple[str, tuple[float, ...]]] = {
    Head.OP: ("operations", tuple(Op)),
    Head.BLEND: ("blends", tuple(Blend)),
    Head.TEMPO: ("tempos", TEMPOS),
    Head.ALPHA_TARGET: ("alpha_targets", ALPHA_TARGETS),
    Head.ALPHA_SPEED: ("alpha_speeds", ALPHA_SPEEDS),
    Head.ALPHA_CURVE: ("alpha_curves", tuple(Curve)),
}
"""The setting that allows choices of a head, and all choices in the order of action columns."""


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
        choices = dict(_SETTINGS.values())[str(info.field_name)]
        unknown = [value for value in values if value not in choices]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(map(str, choices))}")
        return values

    @model_validator(mode="after")
    def _require_usable_operations(self) -> Self:
        if self.isolation is not Isolation.NONE and Op.ADVANCE not in self.operations:
            raise ValueError(
                f"with isolation {self.isolation}, only operation advance ends TRAINING: "
                f"add advance to operations ({', '.join(map(_write_name, self.operations))})"
            )
        if Op.SET_ALPHA in self.operations and len(set(self.alpha_targets)) == 1:
            raise ValueError(
                f"operation set_alpha is never legal, because {self.alpha_targets[0]:g} is the only alpha target: "
                "add another to alpha_targets, or remove set_alpha from operations"
            )
        return self

    def mark_allowed(self, head: Head) -> Bools:
        """Which choices of a head are allowed, ``[n]``; slots and blueprints are not up to the rules."""
        setting, choices = _SETTINGS[head]
        allowed = getattr(self, setting)
        return np.array([choice in allowed for choice in choices])

    @property
    def closed_heads(self) -> frozenset[Head]:
        """The heads for which these rules leave a single choice, whatever the state of the seeds."""
        return frozenset(head for head in CHOICES if self.mark_allowed(head).sum() == 1)

    def narrow(self, known: Rules) -> Rules:
        """These rules without the choices that ``known`` lacks; where no choice would be left, all of them stay."""
        if self == known:
            return self
        changes: dict[str, tuple[object, ...]] = {}
        for setting in (_SETTINGS[head][0] for head in CHOICES):
            allowed: tuple[object, ...] = getattr(self, setting)
            changes[setting] = tuple(choice for choice in allowed if choice in getattr(known, setting)) or allowed
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


def evaluate_gates(table: SeedTable, measurements: SeedMeasurements, rules: Rules) -> Int8s:
    """The `Reason` for which the gate ahead of each slot is open or closed, ``[E, S]``: the first that fails.

    G1 is before BLENDING or TRAINING, G2 before BLENDING, G3 before HOLDING, G5 before FOSSILIZED.
    """
    conditions = (
        (Stage.GERMINATED, measurements.probed, Reason.NOT_PROBED),
        (Stage.TRAINING, table.stage_age >= rules.min_training_steps, Reason.TOO_YOUNG),
        (Stage.TRAINING, measurements.gradient_healthy, Reason.GRADIENT_UNHEALTHY),
        (Stage.BLENDING, table.arrived, Reason.ALPHA_MOVING),
        (Stage.HOLDING, ~np.isnan(measurements.contribution), Reason.NOT_MEASURED),
        (Stage.HOLDING, measurements.contribution_age <= rules.measurement_max_age, Reason.STALE),
        (Stage.HOLDING, measurements.contribution >= -rules.harm_tolerance, Reason.HARMFUL),
    )
    reasons = np.where(_GUARDED[table.stage], np.int8(Reason.PASSED), np.int8(Reason.NO_GATE))
    # In reverse, so that the first failure of a gate overwrites later ones.
    for stage, holds, failure in reversed(conditions):
        reasons[(table.stage == stage) & ~holds] = failure
    return reasons


# Masks of legal actions, exact and conditional in the order of the heads


@dataclass(frozen=True)
class Grounds:
    """What masks were derived from, so that an error can name the rule."""

    table: SeedTable
    gates: Int8s
    """A `Reason`, ``[E, S]``."""
    rules: Rules
    affordable: Bools
    """``[E, S, K]``: blueprints that the budget still allows."""


@dataclass(frozen=True)
class ActionMasks:
    """Conditional legality: True where a choice is legal given the earlier heads.

    A row for an operation or slot that is itself illegal is all False. Sampling head by head from `find_legal` always
    results in a legal action.
    """

    op: Bools
    """``[E, 6]``."""
    slot: Bools
    """``[E, 6, S]`` given the operation; for WAIT only slot 0."""
    blueprint: Bools
    """``[E, S, K]`` for GERMINATE, given the slot."""
    blend: Bools
    """``[E, 3]`` for GERMINATE."""
    tempo: Bools
    """``[E, 3]`` for GERMINATE."""
    alpha_target: Bools
    """``[E, S, 3]`` for GERMINATE and SET_ALPHA, given the slot; never the present target of its seed."""
    alpha_speed: Bools
    """``[E, 4]`` for SET_ALPHA and PRUNE."""
    alpha_curve: Bools
    """``[E, 3]`` for SET_ALPHA and PRUNE."""
    grounds: Grounds

    @property
    def environments(self) -> int:
        """E."""
        return self.op.shape[0]

    def rows(self, index: slice) -> ActionMasks:
        """The masks of some of the environments."""

        def select(part: Any) -> Any:  # the rules have no rows
            return part if isinstance(part, Rules) else part[index]

        return map_arrays(select, self)

    def without(self, disallowed: Bools) -> ActionMasks:
        """The same masks without the operations ``disallowed``; WAIT stays legal.

        Args:
            disallowed: Everywhere, bool ``[E, 6]``, or in some of the slots, bool ``[E, 6, S]``.
        """
        allowed = ~(disallowed[:, :, None] if disallowed.ndim == 2 else disallowed)
        allowed[:, Op.WAIT] = True
        slot = self.slot & allowed
        retargets = slot[:, Op.GERMINATE] | slot[:, Op.SET_ALPHA]
        return replace(
            self,
            op=slot.any(axis=2),
            slot=slot,
            blueprint=self.blueprint & slot[:, Op.GERMINATE, :, None],
            alpha_target=self.alpha_target & retargets[:, :, None],
        )

    def narrow(self, known: Rules) -> ActionMasks:
        """The same masks under `Rules.narrow`: without the choices that the rules ``known`` lack."""
        rules = self.grounds.rules.narrow(known)
        if rules == self.grounds.rules:
            return self
        masks = self.without(np.tile(~rules.mark_allowed(Head.OP), (self.environments, 1)))
        names = {head: head.name.lower() for head in CHOICES}
        choices: dict[str, Any] = {n: getattr(masks, n) & rules.mark_allowed(head) for head, n in names.items()}
        return replace(masks, **choices, grounds=replace(masks.grounds, rules=rules))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of each head."""
        return count_choices(self.slot.shape[2], self.blueprint.shape[2])

    @property
    def germination_target(self) -> Bools:
        """Alpha targets that the rules allow for a new seed, ``[E, 3]``."""
        return np.tile(self.grounds.rules.mark_allowed(Head.ALPHA_TARGET), (self.environments, 1))

    def find_legal(self, head: Head, op: Ints, slot: Ints) -> Bools:
        """Legal choices ``[E, n]`` of ``head`` given ``op [E]`` and ``slot [E]``; only 0 where it is irrelevant."""
        environment = np.arange(self.environments)
        if head is Head.OP:
            return self.op
        if head is Head.SLOT:
            return self.slot[environment, op]
        choices: Bools = getattr(self, head.name.lower())
        if choices.ndim == 3:
            choices = choices[environment, slot]
        only_zero = np.zeros(choices.shape[1], np.bool_)
        only_zero[:1] = True
        return np.where(RELEVANT[op, head][:, None], choices, only_zero)

    def flat(self) -> Bools:
        """Marginal masks ``[E, sum(sizes)]``: choices that are legal after some legal earlier choices."""
        # A choice counts if some operation that reads its head is legal.
        germinate, set_alpha, prune = (self.op[:, op, None] for op in (Op.GERMINATE, Op.SET_ALPHA, Op.PRUNE))
        marginals = (
            self.op,
            self.slot.any(axis=1),
            self.blueprint.any(axis=1),
            self.blend & germinate,
            self.tempo & germinate,
            self.alpha_target.any(axis=1),
            self.alpha_speed & (set_alpha | prune),
            self.alpha_curve & (set_alpha | prune),
        )
        flat = np.concatenate(marginals, axis=1)
        # WAIT is always legal, and after it every other head is 0.
        firsts = np.cumsum([0, *self.sizes[:-1]])
        flat[:, firsts[Head.SLOT :]] = True
        return flat


def legal_actions(
    table: SeedTable, measurements: SeedMeasurements, rules: Rules, compatible: Bools, affordable: Bools | None = None
) -> ActionMasks:
    """The masks of E environments.

    ``compatible [E, S, K]``: whether a blueprint fits a slot. ``affordable [E, S, K]``: whether the budget still allows
    it there; None: all.
    """
    environments, slots = table.stage.shape
    affordable = np.ones_like(compatible) if affordable is None else affordable
    # What the state of the slots, their gates and the rules allow.
    on_offer = compatible & affordable
    gates = evaluate_gates(table, measurements, rules)
    passed = gates == Reason.PASSED
    steerable = ((table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)) & ~table.pruning
    targets = rules.mark_allowed(Head.ALPHA_TARGET)
    retargets = (
        steerable[:, :, None] & targets & (table.alpha_target[:, :, None] != np.array(ALPHA_TARGETS, np.float32))
    )

    # Slots by operation; all other masks follow from them.
    slot = np.zeros((environments, len(Op), slots), dtype=np.bool_)
    slot[:, Op.WAIT, 0] = True
    slot[:, Op.GERMINATE] = (table.stage == Stage.DORMANT) & on_offer.any(axis=2)
    slot[:, Op.ADVANCE] = (table.stage == Stage.TRAINING) & passed
    slot[:, Op.SET_ALPHA] = retargets.any(axis=2)
    slot[:, Op.FOSSILIZE] = (table.stage == Stage.HOLDING) & passed & table.arrived
    slot[:, Op.PRUNE] = table.live & ~table.pruning
    slot &= rules.mark_allowed(Head.OP)[:, None]
    blend, tempo, alpha_speed, alpha_curve = (
        np.tile(rules.mark_allowed(head), (environments, 1))
        for head in (Head.BLEND, Head.TEMPO, Head.ALPHA_SPEED, Head.ALPHA_CURVE)
    )
    return ActionMasks(
        op=np.any(slot, axis=2),
        slot=slot,
        blueprint=on_offer & slot[:, Op.GERMINATE, :, None],
        blend=blend,
        tempo=tempo,
        alpha_target=(targets & slot[:, Op.GERMINATE, :, None]) | (retargets & slot[:, Op.SET_ALPHA, :, None]),
        alpha_speed=alpha_speed,
        alpha_curve=alpha_curve,
        grounds=Grounds(table, gates, rules, affordable),
    )


def is_legal(actions: Ints, masks: ActionMasks) -> Bools:
    """Whether integer actions ``[E, 8]`` are within the masks, with irrelevant heads 0: ``[E]``."""
    _require_shape(actions, masks)
    environment = np.arange(masks.environments)
    legal: Bools = np.all((actions >= 0) & (actions < masks.sizes), axis=1)
    # As WAIT, actions that are out of range are safe indices for the other checks.
    safe = np.where(legal[:, None], actions, 0)
    for head in Head:
        legal = legal & masks.find_legal(head, safe[:, Head.OP], safe[:, Head.SLOT])[environment, safe[:, head]]
    return legal


def require_legal(actions: Ints, masks: ActionMasks) -> None:
    """Raise IllegalActionError for the first action outside the masks, with environment, slot, stage and rule."""
    illegal = np.flatnonzero(~is_legal(actions, masks))
    if illegal.size:
        environment = int(illegal[0])
        raise IllegalActionError(_explain_refusal(actions[environment], environment, masks))


def canonicalise(actions: Ints, masks: ActionMasks) -> tuple[Ints, Bools]:
    """Repair arbitrary integer actions: returns legal actions ``[E, 8]``, and whether rows changed ``[E]``.

    Irrelevant heads become 0; an action that is then still illegal becomes WAIT. Raises IllegalActionError only if
    ``actions`` is not an integer array ``[E, 8]``.
    """
    _require_shape(actions, masks)
    ops = actions[:, Head.OP]
    known = (ops >= 0) & (ops < len(Op))
    effective = clear_irrelevant_heads(np.where(known[:, None], actions, Op.WAIT))
    effective = np.where(is_legal(effective, masks)[:, None], effective, Op.WAIT)
    return effective, np.any(effective != actions, axis=1)


def _require_shape(actions: Ints, masks: ActionMasks) -> None:
    expected = (masks.environments, len(Head))
    if actions.shape != expected or not np.issubdtype(actions.dtype, np.integer):
        raise IllegalActionError(
            f"actions must be an integer array of shape {expected}, not {actions.dtype} of shape {actions.shape}"
        )


# Messages for illegal actions

_STAGES_OF: dict[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.ADVANCE: (Stage.TRAINING,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.PRUNE: LIVE,
}
"""Stages in which an operation may be legal."""


def _explain_refusal(action: Ints, environment: int, masks: ActionMasks) -> str:
    """The message for an illegal action: its place, the rule it breaks, and what to do."""
    where = f"environment {environment}"
    # Indices out of range come first: nothing else can be looked up with them.
    sizes = masks.sizes
    out_of_range = [head for head in Head if not 0 <= action[head] < sizes[head]]
    if Head.OP in out_of_range:
        rule = f"operation {action[Head.OP]} is out of range 0 to {len(Op) - 1}"
    elif Head.SLOT in out_of_range:
        op = Op(action[Head.OP])
        rule = f"{op.name} at slot {action[Head.SLOT]}: the slot is out of range 0 to {sizes[Head.SLOT] - 1}"
    else:
        op, slot = Op(action[Head.OP]), int(action[Head.SLOT])
        row = masks.rows(slice(environment, environment + 1))
        where = f"{where}, slot {slot} (stage {Stage(row.grounds.table.stage[0, slot]).name}): {op.name} is illegal"
        if not row.slot[0, op, slot]:
            rule = _explain_slot(op, slot, row.grounds)
        elif out_of_range:
            head = out_of_range[0]
            rule = f"{head.name.lower()} {action[head]} is out of range 0 to {sizes[head] - 1}"
        else:
            rule = _explain_choice(action, row)
    return f"{where}: {rule}; choose within legal_actions(), or pass actions through canonicalise() first"


def _explain_slot(op: Op, slot: int, grounds: Grounds) -> str:
    """The rule that forbids ``op`` in a slot of the only environment, from the most general to the most special."""
    stage = Stage(grounds.table.stage[0, slot])
    if op is Op.WAIT:
        return "it reads no slot, so slot must be 0"
    if op not in grounds.rules.operations:
        return "the rules leave this operation out"
    if stage not in _STAGES_OF[op]:
        return f"it needs stage {' or '.join(stage.name for stage in _STAGES_OF[op])}"
    if grounds.table.pruning[0, slot]:
        return "the seed is already being pruned"
    if op in (Op.ADVANCE, Op.FOSSILIZE):
        return f"gate {GATES[stage]} is closed, {Reason(grounds.gates[0, slot]).name}"
    unaffordable = not grounds.affordable[0, slot].all()  # GERMINATE is the only operation left
    return f"no blueprint is compatible with this slot{' and within the budget' if unaffordable else ''}"


def _explain_choice(action: Ints, masks: ActionMasks) -> str:
    """The rule that forbids the choice in the first illegal head after the slot, of the only environment."""
    op, slot = Op(action[Head.OP]), int(action[Head.SLOT])
    ops, slots = np.array([op]), np.array([slot])
    head = next(head for head in Head if not masks.find_legal(head, ops, slots)[0, action[head]])
    name, value = head.name.lower(), int(action[head])
    if head is Head.BLUEPRINT and not masks.grounds.affordable[0, slot, value]:
        return f"blueprint {value} does not fit into what is left of the budget"
    if not RELEVANT[op, head]:
        return f"it does not read {name}, which must be 0 and is {value}"
    if head is Head.BLUEPRINT:
        return f"blueprint {value} is not compatible with this slot"
    choice = f"{name} {value} ({CHOICES[head][value]})"
    if head is Head.ALPHA_TARGET and ALPHA_TARGETS[value] in masks.grounds.rules.alpha_targets:
        return f"{choice} is the target that the seed already has"
    return f"the rules leave {choice} out"
