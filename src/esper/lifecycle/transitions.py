"""One step of the lifecycle: apply every environment's action, let time pass in all other slots, and move alpha."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

import numpy as np

from esper.errors import IllegalActionError
from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, TEMPOS, Blend, Curve, Head, Op, Places
from esper.lifecycle.rules import Isolation, Reason, Rules, legal_actions, require_legal
from esper.lifecycle.table import COOLDOWN, NO_BLUEPRINT, OWNING, SeedMeasurements, SeedTable, Stage, make_stage_lookup
from esper.numerics.arrays import Bools, Float32s, Int8s, Int16s, Ints, merge_arrays

_TEMPOS = np.array(TEMPOS, dtype=np.int16)
_TARGETS = np.array(ALPHA_TARGETS, dtype=np.float32)
# A change at once is a ramp of one step.
_RAMPS = np.maximum(np.array(ALPHA_SPEEDS, dtype=np.int16), 1)
_AT_ONCE: Final = ALPHA_SPEEDS.index(0)
_OLDEST = np.iinfo(np.int16).max
_OWNING = make_stage_lookup(OWNING)


class Cause(IntEnum):
    """The cause of a change of stage: an operation (numbered as in `Op`), time, a rollback, a network's start, or the
    end of its growth."""

    GERMINATE = Op.GERMINATE
    ADVANCE = Op.ADVANCE
    SET_ALPHA = Op.SET_ALPHA
    FOSSILIZE = Op.FOSSILIZE
    PRUNE = Op.PRUNE
    TICK = len(Op)
    ROLLBACK = len(Op) + 1
    START = len(Op) + 2
    FINISH = len(Op) + 3


@dataclass(frozen=True)
class Transitions:
    """N changes of stage, within a step ordered by environment and slot; all arrays ``[N]``."""

    env: Ints
    slot: Ints
    before: Int8s
    """A `Stage`."""
    after: Int8s
    """A `Stage`."""
    blueprint: Int16s
    """Index of the blueprint of the seed that was added, kept or removed; -1 in the cooldown."""
    blend: Int8s
    """The `Blend` of that seed."""
    cause: Int8s
    """A `Cause`."""
    reason: Int8s
    """A gate's `Reason`; NO_GATE for transitions that need none."""

    @classmethod
    def none(cls) -> Self:
        """Transitions without a change."""
        index, byte = np.zeros(0, np.int64), np.zeros(0, np.int8)
        return cls(index, index, byte, byte, np.zeros(0, np.int16), byte, byte, byte)

    def __len__(self) -> int:
        return self.env.shape[0]

    @property
    def born(self) -> Bools:
        """Whether a seed was added, by germination or with its network, ``[N]``."""
        return ~_OWNING[self.before] & _OWNING[self.after]


def concatenate_transitions(parts: Sequence[Transitions]) -> Transitions:
    """Concatenate successive transitions of one population."""
    return merge_arrays(np.concatenate, parts)


def clear_changed_measurements(measurements: SeedMeasurements, changes: Transitions) -> SeedMeasurements:
    """Measurements without those of seeds that have just come or gone."""
    changed = changes.born | (changes.after == Stage.PRUNED)
    slots = np.zeros(measurements.probed.shape, np.bool_)
    slots[changes.env[changed], changes.slot[changed]] = True
    return measurements.without(slots)


@dataclass(frozen=True)
class Step:
    """One step: the actions, and what they and time did."""

    actions: Ints
    """``[E, 8]``."""
    stages: Int8s
    """Stages of the slots before the step, ``[E, S]``."""
    gates: Int8s
    """The `Reason` of the gate ahead of each slot before the step, ``[E, S]``."""
    transitions: Transitions
    table: SeedTable
    """After the step."""


def step(
    table: SeedTable,
    measurements: SeedMeasurements,
    actions: Ints,
    rules: Rules,
    compatible: Bools,
    affordable: Bools | None = None,
) -> Step:
    """Apply one action ``[E, 8]`` per environment and let one step pass; ``table`` is not changed.

    A slot that is acted on changes by its action alone in this step; all others tick. ``compatible`` and ``affordable``
    are as in `legal_actions`. Raises IllegalActionError for an action outside those masks.
    """
    masks = legal_actions(table, measurements, rules, compatible, affordable)
    require_legal(actions, masks)
    gates = masks.grounds.gates

    # Each slot changes by its environment's action or by time.
    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    acting = np.flatnonzero(op != Op.WAIT)
    causes = np.full(table.stage.shape, Cause.TICK, dtype=np.int8)
    causes[acting, slot[acting]] = op[acting]

    # Ages stop at the largest int16 instead of overflowing.
    draft = table.copy()
    np.add(draft.stage_age, draft.stage_age < _OLDEST, out=draft.stage_age)
    np.add(draft.seed_age, table.owning & (draft.seed_age < _OLDEST), out=draft.seed_age)
    _let_time_pass(draft, table, gates == Reason.PASSED, causes == Cause.TICK, rules)
    _apply_actions(draft, table, actions, acting)

    # Alpha follows its ramp.
    alpha = compute_alpha(
        draft.alpha_start, draft.alpha_target, draft.alpha_elapsed, draft.alpha_duration, draft.alpha_curve
    )
    np.copyto(draft.alpha, alpha, where=draft.stage == Stage.BLENDING)
    # Changes of alpha and removals need no gate.
    ungated = (causes == Cause.SET_ALPHA) | (causes == Cause.PRUNE)
    reasons = np.where(ungated, np.int8(Reason.NO_GATE), gates)
    return Step(actions, table.stage, gates, _list_changes(table, draft, causes, reasons), draft)


def remove_seeds(table: SeedTable, slots: Bools) -> tuple[SeedTable, Transitions]:
    """The table after a rollback that removes the seeds in ``slots [E, S]``, fossils included, and the transitions.

    The slots enter their cooldown in the present step; no time passes.
    """
    draft = table.copy()
    _empty_slots(draft, np.nonzero(slots & table.owning))
    return draft, _list_changes(table, draft, Cause.ROLLBACK, Reason.NO_GATE)


def finish_growth(table: SeedTable, kept: Bools, pruned: Bools) -> tuple[SeedTable, Transitions]:
    """End growth: fossilize the unfinished seeds in slots ``kept [E, S]``, remove those in ``pruned [E, S]``.

    Returns the table and the transitions. No gate is checked and no time passes. Fossils keep the alpha of the seeds.
    """
    refused = (kept & pruned) | ((kept | pruned) & ~table.live) | (kept & ~(table.blended & (table.alpha > 0)))
    if refused.any():
        env, slot = (int(part[0]) for part in np.nonzero(refused))
        raise IllegalActionError(
            f"growth of network {env} cannot end with slot {slot}, which is in stage "
            f"{Stage(table.stage[env, slot]).name}, {'kept' if kept[env, slot] else 'pruned'}: "
            "keep unfinished seeds that have weight, prune others"
        )
    draft = table.copy()
    at = np.nonzero(kept)
    _enter_stage(draft, at, Stage.FOSSILIZED)
    draft.pruning[at] = False
    # The ramp ends where it is.
    draft.alpha_start[at] = draft.alpha_target[at] = table.alpha[at]
    draft.alpha_elapsed[at] = table.alpha_duration[at]
    _empty_slots(draft, np.nonzero(pruned))
    return draft, _list_changes(table, draft, Cause.FINISH, Reason.NO_GATE)


def add_fossils(table: SeedTable, blueprints: Ints, blends: Ints, compatible: Bools) -> tuple[SeedTable, Transitions]:
    """The table with fossils of ``blueprints [E, S]`` (-1: none) at alpha 1, and the transitions.

    For networks that have seeds from their first step; no time passes. ``blends [E, S]`` are their blends,
    ``compatible [E, S, K]`` is as in `legal_actions`.
    """
    at = np.nonzero(blueprints != NO_BLUEPRINT)
    fossils = blueprints[at]
    refused = (table.stage[at] != Stage.DORMANT) | ~compatible[(*at, fossils)]
    if refused.any():
        env, slot, blueprint = (int(part[refused][0]) for part in (*at, fossils))
        raise IllegalActionError(
            f"network {env} cannot start with blueprint {blueprint} in slot {slot}, which is in stage "
            f"{Stage(table.stage[env, slot]).name}: choose a dormant slot that the blueprint fits"
        )
    draft = table.copy()
    _enter_stage(draft, at, Stage.FOSSILIZED)
    draft.seed_age[at] = 1
    draft.blueprint[at] = fossils
    draft.blend[at] = blends[at]
    for schedule in (draft.alpha, draft.alpha_target, draft.alpha_elapsed, draft.alpha_duration):
        schedule[at] = 1
    return draft, _list_changes(table, draft, Cause.START, Reason.NO_GATE)


# What changes in a draft of the next table


def _let_time_pass(draft: SeedTable, table: SeedTable, passed: Bools, ticking: Bools, rules: Rules) -> None:
    """Let one step pass in the slots ``ticking [E, S]``; ``passed [E, S]``: whose gates are open."""
    probed = ticking & (table.stage == Stage.GERMINATED)
    blending = ticking & (table.stage == Stage.BLENDING)
    arrived = blending & passed

    # A probed seed starts to learn, or is removed.
    first = Stage.BLENDING if rules.isolation is Isolation.NONE else Stage.TRAINING
    _enter_stage(draft, np.nonzero(probed & passed), first)
    if first is Stage.BLENDING:
        blending |= probed & passed
    # A blending seed moves on along its ramp, or holds at its end.
    draft.alpha_elapsed[blending & ~arrived] += 1
    _enter_stage(draft, np.nonzero(arrived & ~table.pruning), Stage.HOLDING)
    _empty_slots(draft, np.nonzero((probed & ~passed) | (arrived & table.pruning)))

    # An empty slot cools down.
    next_stages = (*COOLDOWN[1:], Stage.DORMANT)
    for stage, after, steps in zip(COOLDOWN, next_stages, rules.cooldown, strict=True):
        _enter_stage(draft, np.nonzero(ticking & (table.stage == stage) & (table.stage_age >= steps)), after)


def _apply_actions(draft: SeedTable, table: SeedTable, actions: Ints, acting: Ints) -> None:
    """Apply the actions of the environments ``acting [A]``, each to one slot: operation by operation, all at once."""

    def select(op: Op) -> tuple[Ints, Places]:
        environments = acting[actions[acting, Head.OP] == op]
        return actions[environments], (environments, actions[environments, Head.SLOT])

    # The ramp of a new seed is set, and starts when it enters BLENDING.
    rows, at = select(Op.GERMINATE)
    _enter_stage(draft, at, Stage.GERMINATED)
    draft.seed_age[at] = 1
    draft.blueprint[at] = rows[:, Head.BLUEPRINT]
    draft.blend[at] = rows[:, Head.BLEND]
    draft.alpha_target[at] = _TARGETS[rows[:, Head.ALPHA_TARGET]]
    draft.alpha_duration[at] = _TEMPOS[rows[:, Head.TEMPO]]
    draft.alpha_curve[at] = Curve.LINEAR

    _, at = select(Op.ADVANCE)
    _enter_stage(draft, at, Stage.BLENDING)
    draft.alpha_elapsed[at] = 1

    rows, at = select(Op.SET_ALPHA)
    _retarget(draft, table, at, _TARGETS[rows[:, Head.ALPHA_TARGET]], rows)

    _, at = select(Op.FOSSILIZE)
    _enter_stage(draft, at, Stage.FOSSILIZED)

    rows, at = select(Op.PRUNE)
    # A seed without weight, or with a change at once, is removed in this step.
    at_once = (rows[:, Head.ALPHA_SPEED] == _AT_ONCE) | (table.alpha[at] == 0)
    _empty_slots(draft, _select_places(at, at_once))
    # Other seeds ramp down first, and are removed at the end of the ramp.
    ramping = _select_places(at, ~at_once)
    _retarget(draft, table, ramping, np.zeros(len(ramping[0]), np.float32), rows[~at_once])
    draft.pruning[ramping] = True


def _select_places(at: Places, selected: Bools) -> Places:
    return at[0][selected], at[1][selected]


def _enter_stage(draft: SeedTable, at: Places, stage: Stage) -> None:
    draft.stage[at] = stage
    draft.stage_age[at] = 1


def _retarget(draft: SeedTable, table: SeedTable, at: Places, target: Float32s, rows: Ints) -> None:
    """Start a ramp of alpha from its present value to ``target``; the present step is its first."""
    # A held seed goes back to BLENDING; one that blends already stays there and keeps its age.
    holding = table.stage[at] == Stage.HOLDING
    _enter_stage(draft, _select_places(at, holding), Stage.BLENDING)
    draft.alpha_start[at] = table.alpha[at]
    draft.alpha_target[at] = target
    draft.alpha_elapsed[at] = 1
    draft.alpha_duration[at] = _RAMPS[rows[:, Head.ALPHA_SPEED]]
    draft.alpha_curve[at] = rows[:, Head.ALPHA_CURVE]


def _empty_slots(draft: SeedTable, at: Places) -> None:
    """Remove seeds: their slots enter the cooldown and have the values of empty ones."""
    _enter_stage(draft, at, Stage.PRUNED)
    draft.seed_age[at] = 0
    draft.blueprint[at] = NO_BLUEPRINT
    draft.blend[at] = Blend.ADD
    draft.alpha_curve[at] = Curve.LINEAR
    draft.pruning[at] = False
    for schedule in (draft.alpha, draft.alpha_start, draft.alpha_target, draft.alpha_elapsed, draft.alpha_duration):
        schedule[at] = 0


def _list_changes(table: SeedTable, draft: SeedTable, causes: Int8s | Cause, reasons: Int8s | Reason) -> Transitions:
    at, shape = np.nonzero(table.stage != draft.stage), table.stage.shape
    return Transitions(
        env=at[0],
        slot=at[1],
        before=table.stage[at],
        after=draft.stage[at],
        # One of the two tables has the seed; the other has -1, or 0 for its blend.
        blueprint=np.maximum(table.blueprint, draft.blueprint)[at],
        blend=np.maximum(table.blend, draft.blend)[at],
        cause=np.broadcast_to(np.int8(causes), shape)[at],
        reason=np.broadcast_to(np.int8(reasons), shape)[at],
    )


# Ramps of alpha

SIGMOID_STEEPNESS = 10.0
"""Slope k of the logistic curve: at 10 its ends miss 0 and 1 by .7%, which the rescaling removes."""
LONGEST_RAMP = max(*TEMPOS, *ALPHA_SPEEDS)
"""Most steps of a ramp of alpha."""


def compute_ramp_progress(curve: Curve, fraction: float) -> float:
    """Progress of a ramp at a ``fraction`` in [0, 1] of its time; it rises from exactly 0 to exactly 1.

    linear x; cosine (1 - cos(pi x)) / 2; sigmoid (f(x) - f(0)) / (f(1) - f(0)), f(x) = 1 / (1 + exp(-k (x - 1/2))).
    """
    if fraction <= 0.0 or fraction >= 1.0:
        return float(fraction >= 1.0)
    if curve is Curve.LINEAR:
        return fraction
    if curve is Curve.COSINE:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0
    first, here, last = (1.0 / (1.0 + math.exp(-SIGMOID_STEEPNESS * (x - 0.5))) for x in (0.0, fraction, 1.0))
    return (here - first) / (last - first)


# [curve, duration, elapsed]. A lookup is fast, and exact: vectorised cos and exp may round differently by an element's
# place in the array, and then one environment's alpha would depend on the number of environments.
_PROGRESS: Float32s = np.array(
    [
        [
            [compute_ramp_progress(curve, elapsed / max(duration, 1)) for elapsed in range(LONGEST_RAMP + 1)]
            for duration in range(LONGEST_RAMP + 1)
        ]
        for curve in Curve
    ],
    dtype=np.float32,
)


def compute_alpha(start: Float32s, target: Float32s, elapsed: Int16s, duration: Int16s, curve: Int8s) -> Float32s:
    """Alpha after ``elapsed`` of ``duration`` steps of a ramp from ``start`` to ``target``, which it reaches exactly.

    All arrays have the same shape; durations are 1 to `LONGEST_RAMP` steps, elapsed is at most the duration.
    """
    moving = start + (target - start) * _PROGRESS[curve, duration, elapsed]
    return np.where(elapsed >= duration, target, moving)
