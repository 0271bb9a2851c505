"""Which actions are legal: exact, conditional masks in the order of the heads; refusing what is not, or mending it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
from esper.lifecycle.rules import GATES, Reason, Rules, Verdicts, evaluate_gates
from esper.lifecycle.stages import LIVE, Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Ints, map_arrays

_TARGETS = np.array(ALPHA_TARGETS, dtype=np.float32)


@dataclass(frozen=True)
class Grounds:
    """What masks were derived from, so that a refusal can name its rule."""

    table: SeedTable
    verdicts: Verdicts
    """Of the gate ahead of each slot."""
    rules: Rules
    affordable: Bools
    """``[E, S, K]``: which blueprints the budget still allows."""


@dataclass(frozen=True)
class ActionMasks:
    """Conditional legality: True where a choice is legal given the earlier heads.

    A row for an operation or slot that is itself illegal is all False. Whoever samples head by head from `find_legal`
    always ends with a legal action.
    """

    op: Bools
    """``[E, 6]``."""
    slot: Bools
    """``[E, 6, S]`` given the operation; for WAIT only slot 0."""
    blueprint: Bools
    """``[E, S, K]`` for GERMINATE, given the slot."""
    blend: Bools
    """``[E, 3]`` for GERMINATE: a seed keeps its blend."""
    tempo: Bools
    """``[E, 3]`` for GERMINATE."""
    alpha_target: Bools
    """``[E, S, 3]`` for GERMINATE and SET_ALPHA, given the slot: not the target that a seed there already has."""
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

        def select(part: Any) -> Any:  # rules are for all of them
            return part if isinstance(part, Rules) else part[index]

        return map_arrays(select, self)

    def without(self, disallowed: Bools) -> ActionMasks:
        """The same masks without the operations ``disallowed``, bool ``[E, 6]``; WAIT stays legal."""
        allowed = ~disallowed
        allowed[:, Op.WAIT] = True
        slot = self.slot & allowed[:, :, None]
        retargets = slot[:, Op.GERMINATE] | slot[:, Op.SET_ALPHA]
        return replace(
            self,
            op=self.op & allowed,
            slot=slot,
            blueprint=self.blueprint & slot[:, Op.GERMINATE, :, None],
            alpha_target=self.alpha_target & retargets[:, :, None],
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of each head."""
        return count_choices(self.slot.shape[2], self.blueprint.shape[2])

    @property
    def germination_target(self) -> Bools:
        """``[E, 3]`` alpha targets that the rules allow a new seed."""
        return np.tile(_mark_offered(ALPHA_TARGETS, self.grounds.rules.alpha_targets), (self.environments, 1))

    def find_legal(self, head: Head, op: Ints, slot: Ints) -> Bools:
        """The choices ``[E, n]`` of ``head`` after ``op [E]`` and ``slot [E]``; only 0 where the head is irrelevant."""
        environment = np.arange(self.environments)
        if head is Head.OP:
            return self.op
        if head is Head.SLOT:
            return self.slot[environment, op]
        choices = {
            Head.BLUEPRINT: self.blueprint[environment, slot],
            Head.BLEND: self.blend,
            Head.TEMPO: self.tempo,
            Head.ALPHA_TARGET: self.alpha_target[environment, slot],
            Head.ALPHA_SPEED: self.alpha_speed,
            Head.ALPHA_CURVE: self.alpha_curve,
        }[head]
        only_zero = np.zeros(choices.shape[1], dtype=np.bool_)
        only_zero[:1] = True
        return np.where(RELEVANT[op, head][:, None], choices, only_zero)

    def flat(self) -> Bools:
        """Marginal masks ``[E, sum(count_choices)]``: choices that are legal after some legal earlier choices."""
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
    table: SeedTable, evidence: Evidence, rules: Rules, compatible: Bools, affordable: Bools | None = None
) -> ActionMasks:
    """The masks of every environment.

    ``compatible [E, S, K]`` says which blueprint fits which slot, ``affordable [E, S, K]`` which of them the budget
    still allows there (None: all).
    """
    environments, slots = table.stage.shape
    if affordable is None:
        affordable = np.ones_like(compatible)
    on_offer = compatible & affordable
    verdicts = evaluate_gates(table, evidence, rules)
    dormant = table.stage == Stage.DORMANT
    steerable = ((table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)) & ~table.pruning
    allowed_targets = _mark_offered(ALPHA_TARGETS, rules.alpha_targets)
    retargets = steerable[:, :, None] & allowed_targets & (table.alpha_target[:, :, None] != _TARGETS)

    slot = np.zeros((environments, len(Op), slots), dtype=np.bool_)
    slot[:, Op.WAIT, 0] = True
    slot[:, Op.GERMINATE] = dormant & on_offer.any(axis=2)
    slot[:, Op.ADVANCE] = (table.stage == Stage.TRAINING) & verdicts.passed
    slot[:, Op.SET_ALPHA] = retargets.any(axis=2)
    slot[:, Op.FOSSILIZE] = (table.stage == Stage.HOLDING) & verdicts.passed & table.arrived
    slot[:, Op.PRUNE] = table.live & ~table.pruning
    slot &= _mark_offered(list(Op), rules.operations)[:, None]

    def everywhere(choices: Bools) -> Bools:
        return np.tile(choices, (environments, 1))

    return ActionMasks(
        op=np.any(slot, axis=2),
        slot=slot,
        blueprint=on_offer & slot[:, Op.GERMINATE, :, None],
        blend=everywhere(_mark_offered(list(Blend), rules.blends)),
        tempo=everywhere(_mark_offered(TEMPOS, rules.tempos)),
        alpha_target=(allowed_targets & slot[:, Op.GERMINATE, :, None]) | (retargets & slot[:, Op.SET_ALPHA, :, None]),
        alpha_speed=everywhere(_mark_offered(ALPHA_SPEEDS, rules.alpha_speeds)),
        alpha_curve=everywhere(_mark_offered(list(Curve), rules.alpha_curves)),
        grounds=Grounds(table=table, verdicts=verdicts, rules=rules, affordable=affordable),
    )


def _mark_offered(choices: Sequence[float], allowed: Sequence[float]) -> Bools:
    return np.array([choice in allowed for choice in choices])


_STAGES_OF: dict[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.ADVANCE: (Stage.TRAINING,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.PRUNE: LIVE,
}


def is_legal(actions: Ints, masks: ActionMasks) -> Bools:
    """Whether each environment's action ``[E, 8]`` lies within the masks, irrelevant heads being 0: ``[E]``.

    Raises IllegalActionError if ``actions`` is not an integer array of that shape.
    """
    _require_shape(actions, masks)
    environment = np.arange(masks.environments)
    in_range: Bools = np.all((actions >= 0) & (actions < masks.sizes), axis=1)
    safe = np.where(in_range[:, None], actions, 0)
    verdict = in_range
    for head in Head:
        verdict = verdict & masks.find_legal(head, safe[:, Head.OP], safe[:, Head.SLOT])[environment, safe[:, head]]
    return verdict


def require_legal(actions: Ints, masks: ActionMasks) -> None:
    """Raises IllegalActionError that names environment, slot, stage and rule of the first action outside the masks."""
    offences = np.flatnonzero(~is_legal(actions, masks))
    if offences.size:
        environment = int(offences[0])
        raise IllegalActionError(_explain_refusal(actions[environment], environment, masks))


def canonicalise(actions: Ints, masks: ActionMasks) -> tuple[Ints, Bools]:
    """The legal actions ``[E, 8]`` that take effect in place of any integers, and which rows changed ``[E]``.

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


def _explain_refusal(action: Ints, environment: int, masks: ActionMasks) -> str:
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
        own = masks.rows(slice(environment, environment + 1))
        where = f"{where}, slot {slot} (stage {Stage(own.grounds.table.stage[0, slot]).name}): {op.name} is illegal"
        if not own.slot[0, op, slot]:
            rule = _explain_slot(op, slot, own.grounds)
        elif stray:
            rule = f"{stray[0].name.lower()} {action[stray[0]]} is out of range 0 to {sizes[stray[0]] - 1}"
        else:
            rule = _explain_choice(action, own)
    return f"{where}: {rule}; choose within legal_actions(), or pass actions through canonicalise() first"


def _explain_slot(op: Op, slot: int, grounds: Grounds) -> str:
    """Why the only environment may not do ``op`` in that slot."""
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
        return f"gate {GATES[stage]} is closed, {Reason(grounds.verdicts.reason[0, slot]).name}"
    unaffordable = not grounds.affordable[0, slot].all()  # which only germinating asks
    return f"no blueprint is compatible with this slot{' and within the budget' if unaffordable else ''}"


def _explain_choice(action: Ints, masks: ActionMasks) -> str:
    """Why the only environment may not choose as it does in the first head that is wrong, behind the slot."""
    op, slot = Op(action[Head.OP]), int(action[Head.SLOT])
    given = np.array([op]), np.array([slot])
    head = next(head for head in Head if not masks.find_legal(head, *given)[0, action[head]])
    name, value = head.name.lower(), int(action[head])
    if head is Head.BLUEPRINT and not masks.grounds.affordable[0, slot, value]:
        return f"blueprint {value} does not fit into what is left of the budget"
    if not RELEVANT[op, head]:
        return f"it does not read {name}, which must be 0 and is {value}"
    if head is Head.BLUEPRINT:
        return f"blueprint {value} is not compatible with this slot"
    shown = f"{name} {value} ({CHOICES[head][value]})"
    if head is Head.ALPHA_TARGET and ALPHA_TARGETS[value] in masks.grounds.rules.alpha_targets:
        return f"{shown} is the target that the seed already has"
    return f"the rules leave {shown} out"
