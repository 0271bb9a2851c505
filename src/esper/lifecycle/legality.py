"""Refusing illegal actions, or making legal ones of them."""

from __future__ import annotations

import numpy as np

from esper.errors import IllegalActionError
from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, RELEVANT, TEMPOS, Blend, Curve, Head, Op, canonical
from esper.lifecycle.arrays import Bools, Int64s
from esper.lifecycle.gates import Reason
from esper.lifecycle.masks import ActionMasks
from esper.lifecycle.stages import LIVE, Stage

_STAGES_OF: dict[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.ADVANCE: (Stage.TRAINING,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.PRUNE: LIVE,
}
_GATED = {Op.ADVANCE: "G2", Op.FOSSILIZE: "G5"}
_VALUES: dict[Head, tuple[object, ...]] = {
    Head.BLEND: tuple(blend.name for blend in Blend),
    Head.TEMPO: TEMPOS,
    Head.ALPHA_TARGET: ALPHA_TARGETS,
    Head.ALPHA_SPEED: ALPHA_SPEEDS,
    Head.ALPHA_CURVE: tuple(curve.name for curve in Curve),
}


def legal(actions: Int64s, masks: ActionMasks) -> Bools:
    """Whether each environment's action ``[E, 8]`` lies within the masks, irrelevant heads being 0: ``[E]``.

    Raises IllegalActionError if ``actions`` is not an integer array of that shape.
    """
    _require_shape(actions, masks)
    environment = np.arange(masks.environments)
    in_range: Bools = np.all((actions >= 0) & (actions < masks.sizes), axis=1)
    safe = np.where(in_range[:, None], actions, 0)
    verdict = in_range
    for head in Head:
        verdict = verdict & masks.given(head, safe[:, Head.OP], safe[:, Head.SLOT])[environment, safe[:, head]]
    return verdict


def check(actions: Int64s, masks: ActionMasks) -> None:
    """Raises IllegalActionError that names environment, slot, stage and rule of the first action outside the masks."""
    offences = np.flatnonzero(~legal(actions, masks))
    if offences.size:
        environment = int(offences[0])
        raise IllegalActionError(_refusal(actions[environment], environment, masks))


def canonicalise(actions: Int64s, masks: ActionMasks) -> tuple[Int64s, Bools]:
    """The legal actions ``[E, 8]`` that take effect in place of any integers, and which rows changed ``[E]``.

    Irrelevant heads become 0; an action that is then still illegal becomes WAIT. Raises IllegalActionError only if
    ``actions`` is not an integer array ``[E, 8]``.
    """
    _require_shape(actions, masks)
    ops = actions[:, Head.OP]
    known = (ops >= 0) & (ops < len(Op))
    effective = canonical(np.where(known[:, None], actions, Op.WAIT))
    effective = np.where(legal(effective, masks)[:, None], effective, Op.WAIT)
    return effective, np.any(effective != actions, axis=1)


def _require_shape(actions: Int64s, masks: ActionMasks) -> None:
    expected = (masks.environments, len(Head))
    if actions.shape != expected or not np.issubdtype(actions.dtype, np.integer):
        raise IllegalActionError(
            f"actions must be an integer array of shape {expected}, not {actions.dtype} of shape {actions.shape}"
        )


def _refusal(action: Int64s, environment: int, masks: ActionMasks) -> str:
    """One sentence on why this environment's action is illegal, and how to get a legal one."""
    where = f"environment {environment}"
    sizes = masks.sizes
    stray = [head for head in Head if not 0 <= action[head] < sizes[head]]
    if Head.OP in stray:
        rule = f"operation {action[Head.OP]} is out of range 0 to {len(Op) - 1}"
    elif Head.SLOT in stray:
        op = Op(action[Head.OP])
        rule = f"{op.name} at slot {action[Head.SLOT]}: the slot is out of range 0 to {sizes[Head.SLOT] - 1}"
    else:
        op, slot = Op(action[Head.OP]), int(action[Head.SLOT])
        stage = Stage(masks.grounds.table.stage[environment, slot])
        where = f"{where}, slot {slot} (stage {stage.name}): {op.name} is illegal"
        rule = _broken_rule(action, environment, masks, stray)
    return f"{where}: {rule}; choose within legal_actions(), or pass actions through canonicalise() first"


def _broken_rule(action: Int64s, environment: int, masks: ActionMasks, stray: list[Head]) -> str:
    op, slot = Op(action[Head.OP]), int(action[Head.SLOT])
    if not masks.slot[environment, op, slot]:
        return _broken_slot_rule(op, environment, slot, masks)
    if stray:
        head = stray[0]
        return f"{head.name.lower()} {action[head]} is out of range 0 to {masks.sizes[head] - 1}"
    given = (np.full(masks.environments, op), np.full(masks.environments, slot))
    head = next(head for head in Head if not masks.given(head, *given)[environment, action[head]])
    if head is Head.BLUEPRINT and not masks.grounds.affordable[environment, slot, action[head]]:
        return f"blueprint {action[head]} does not fit into what is left of the budget"
    return _broken_head_rule(head, op, int(action[head]), masks)


def _broken_slot_rule(op: Op, environment: int, slot: int, masks: ActionMasks) -> str:
    grounds = masks.grounds
    stage = Stage(grounds.table.stage[environment, slot])
    if op is Op.WAIT:
        return "it reads no slot, so slot must be 0"
    if op not in grounds.rules.operations:
        return "the rules leave this operation out"
    if stage not in _STAGES_OF[op]:
        return f"it needs stage {' or '.join(stage.name for stage in _STAGES_OF[op])}"
    if grounds.table.pruning[environment, slot]:
        return "the seed is already being pruned"
    if op in _GATED:
        reason = Reason(grounds.verdicts.reason[environment, slot])
        return f"gate {_GATED[op]} is closed, {reason.name}"
    unaffordable = not grounds.affordable[environment, slot].all()  # which only germinating asks
    return f"no blueprint is compatible with this slot{' and within the budget' if unaffordable else ''}"


def _broken_head_rule(head: Head, op: Op, value: int, masks: ActionMasks) -> str:
    name = head.name.lower()
    if not RELEVANT[op, head]:
        return f"it does not read {name}, which must be 0 and is {value}"
    if head is Head.BLUEPRINT:
        return f"blueprint {value} is not compatible with this slot"
    shown = f"{name} {value} ({_VALUES[head][value]})"
    if head is Head.ALPHA_TARGET and ALPHA_TARGETS[value] in masks.grounds.rules.alpha_targets:
        return f"{shown} is the target that the seed already has"
    return f"the rules leave {shown} out"
