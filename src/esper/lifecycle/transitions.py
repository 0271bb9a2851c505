"""One step of the lifecycle: every environment's action, then time passes in the other slots, and alpha moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

import numpy as np

from esper.errors import IllegalActionError
from esper.lifecycle.actions import (
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    TEMPOS,
    Blend,
    Curve,
    Head,
    Op,
    Places,
)
from esper.lifecycle.legality import legal_actions, require_legal
from esper.lifecycle.rules import Isolation, Reason, Rules, Verdicts
from esper.lifecycle.stages import COOLDOWN, OWNING, Stage, make_stage_lookup
from esper.lifecycle.table import NO_BLUEPRINT, Evidence, SeedTable
from esper.numerics.arrays import Bools, Float32s, Int8s, Int16s, Ints, merge_arrays

_TEMPOS = np.array(TEMPOS, dtype=np.int16)
_TARGETS = np.array(ALPHA_TARGETS, dtype=np.float32)
# A change at once is a ramp of one step.
_RAMPS = np.maximum(np.array(ALPHA_SPEEDS, dtype=np.int16), 1)
_AT_ONCE: Final = ALPHA_SPEEDS.index(0)
_OLDEST = np.iinfo(np.int16).max
_OWNING = make_stage_lookup(OWNING)


class Cause(IntEnum):
    """What moved a slot to another stage: an operation (numbered as in `Op`), time, a rollback, a network's start or
    the end of its growth."""

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
    """N changes of stage, those of one step ordered by environment and slot; all arrays ``[N]``."""

    env: Ints
    slot: Ints
    before: Int8s
    """A `Stage`."""
    after: Int8s
    """A `Stage`."""
    blueprint: Int16s
    """Of the seed that came, stayed or went; -1 in the cooldown."""
    blend: Int8s
    """Of the same seed, a `Blend`."""
    cause: Int8s
    """A `Cause`."""
    reason: Int8s
    """A gate's `Reason`; NO_GATE for transitions that need none."""

    @classmethod
    def none(cls) -> Self:
        """No changes."""
        index, byte = np.zeros(0, np.int64), np.zeros(0, np.int8)
        return cls(index, index, byte, byte, np.zeros(0, np.int16), byte, byte, byte)

    def __len__(self) -> int:
        """N."""
        return self.env.shape[0]

    @property
    def born(self) -> Bools:
        """``[N]``: whether a seed came, by germination or with its network."""
        return ~_OWNING[self.before] & _OWNING[self.after]


def concatenate(parts: Sequence[Transitions]) -> Transitions:
    """Several changes of one population, one after the other, as one record."""
    return merge_arrays(np.concatenate, parts)


@dataclass(frozen=True)
class Step:
    """What one step led to."""

    table: SeedTable
    transitions: Transitions
    verdicts: Verdicts
    """Of the gate ahead of each slot, as it was when the step began."""


def step(
    table: SeedTable,
    evidence: Evidence,
    actions: Ints,
    rules: Rules,
    compatible: Bools,
    affordable: Bools | None = None,
) -> Step:
    """Applies one action ``[E, 8]`` per environment and lets one step pass; the given table is left as it is.

    A slot that was acted on changes by its action alone in this step; all others tick. ``compatible`` and
    ``affordable`` are as in `legal_actions`. Raises IllegalActionError for an action outside those masks; then nothing
    happened.
    """
    masks = legal_actions(table, evidence, rules, compatible, affordable)
    require_legal(actions, masks)
    verdicts = masks.grounds.verdicts

    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    acting = np.flatnonzero(op != Op.WAIT)
    causes = np.full(table.stage.shape, Cause.TICK, dtype=np.int8)
    causes[acting, slot[acting]] = op[acting]

    draft = table.copy()
    np.add(draft.stage_age, draft.stage_age < _OLDEST, out=draft.stage_age)
    np.add(draft.seed_age, table.owning & (draft.seed_age < _OLDEST), out=draft.seed_age)
    _tick(draft, table, verdicts, causes == Cause.TICK, rules)
    _operate(draft, table, actions, acting)
    alpha = alpha_at(
        draft.alpha_start, draft.alpha_target, draft.alpha_elapsed, draft.alpha_duration, draft.alpha_curve
    )
    np.copyto(draft.alpha, alpha, where=draft.stage == Stage.BLENDING)
    ungated = (causes == Cause.SET_ALPHA) | (causes == Cause.PRUNE)
    reasons = np.where(ungated, np.int8(Reason.NO_GATE), verdicts.reason)
    return Step(table=draft, transitions=_list_changes(table, draft, causes, reasons), verdicts=verdicts)


def remove_seeds(table: SeedTable, slots: Bools) -> tuple[SeedTable, Transitions]:
    """The table after a rollback has removed the seeds in ``slots [E, S]``, fossils among them, and what changed.

    They enter their cooldown in the step that is under way; no time passes. The given table is left as it is.
    """
    draft = table.copy()
    _release(draft, np.nonzero(slots & table.owning))
    return draft, _list_changes(table, draft, Cause.ROLLBACK, Reason.NO_GATE)


def finish_growth(table: SeedTable, kept: Bools, pruned: Bools) -> tuple[SeedTable, Transitions]:
    """The table once the unfinished seeds in slots ``kept [E, S]`` are fossils, and those in ``pruned [E, S]`` gone.

    That is how growth ends, without gates; no time passes. Fossils have the alpha that the seeds had. The given table
    is left as it is.

    Raises:
        IllegalActionError: a slot is both, has no unfinished seed, or is to be kept while its seed has no weight.
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
    _enter(draft, at, Stage.FOSSILIZED)
    draft.pruning[at] = False
    draft.alpha_start[at] = draft.alpha_target[at] = table.alpha[at]
    draft.alpha_elapsed[at] = table.alpha_duration[at]
    _release(draft, np.nonzero(pruned))
    return draft, _list_changes(table, draft, Cause.FINISH, Reason.NO_GATE)


def add_fossils(table: SeedTable, blueprints: Ints, blends: Ints, compatible: Bools) -> tuple[SeedTable, Transitions]:
    """The table with a fossil at alpha 1 wherever ``blueprints [E, S]`` names one (-1: none), and what changed.

    That is how networks start that have seeds from their first step; no time passes. ``blends [E, S]`` says how they
    join the features, ``compatible [E, S, K]`` is as in `legal_actions`. The given table is left as it is.

    Raises:
        IllegalActionError: a slot is not dormant, or its blueprint does not serve it.
    """
    at = np.nonzero(blueprints != NO_BLUEPRINT)
    chosen = blueprints[at]
    refused = (table.stage[at] != Stage.DORMANT) | ~compatible[(*at, chosen)]
    if refused.any():
        env, slot, blueprint = (int(part[refused][0]) for part in (*at, chosen))
        raise IllegalActionError(
            f"network {env} cannot start with blueprint {blueprint} in slot {slot}, which is in stage "
            f"{Stage(table.stage[env, slot]).name}: choose a dormant slot that the blueprint serves"
        )
    draft = table.copy()
    _enter(draft, at, Stage.FOSSILIZED)
    draft.seed_age[at] = 1
    draft.blueprint[at] = chosen
    draft.blend[at] = blends[at]
    for schedule in (draft.alpha, draft.alpha_target, draft.alpha_elapsed, draft.alpha_duration):
        schedule[at] = 1
    return draft, _list_changes(table, draft, Cause.START, Reason.NO_GATE)


def _tick(draft: SeedTable, table: SeedTable, verdicts: Verdicts, ticking: Bools, rules: Rules) -> None:
    """Time passes in the slots ``ticking [E, S]``."""
    probed = ticking & (table.stage == Stage.GERMINATED)
    blending = ticking & (table.stage == Stage.BLENDING)
    arrived = blending & verdicts.passed
    released = (probed & ~verdicts.passed) | (arrived & table.pruning)

    first = Stage.BLENDING if rules.isolation is Isolation.NONE else Stage.TRAINING
    _enter(draft, np.nonzero(probed & verdicts.passed), first)
    if first is Stage.BLENDING:
        blending |= probed & verdicts.passed
    draft.alpha_elapsed[blending & ~arrived] += 1
    _enter(draft, np.nonzero(arrived & ~table.pruning), Stage.HOLDING)
    _release(draft, np.nonzero(released))
    following = (*COOLDOWN[1:], Stage.DORMANT)
    for stage, after, steps in zip(COOLDOWN, following, rules.cooldown, strict=True):
        _enter(draft, np.nonzero(ticking & (table.stage == stage) & (table.stage_age >= steps)), after)


def _operate(draft: SeedTable, table: SeedTable, actions: Ints, acting: Ints) -> None:
    """Applies the actions of the environments ``acting [A]``, each to its one slot."""

    def places(op: Op) -> tuple[Ints, Places]:
        environments = acting[actions[acting, Head.OP] == op]
        return actions[environments], (environments, actions[environments, Head.SLOT])

    chosen, at = places(Op.GERMINATE)
    _germinate(draft, at, chosen)

    _, at = places(Op.ADVANCE)
    _enter(draft, at, Stage.BLENDING)
    draft.alpha_elapsed[at] = 1

    chosen, at = places(Op.SET_ALPHA)
    _retarget(draft, table, at, _TARGETS[chosen[:, Head.ALPHA_TARGET]], chosen)

    _, at = places(Op.FOSSILIZE)
    _enter(draft, at, Stage.FOSSILIZED)

    chosen, at = places(Op.PRUNE)
    at_once = (chosen[:, Head.ALPHA_SPEED] == _AT_ONCE) | (table.alpha[at] == 0)
    _release(draft, _select_places(at, at_once))
    ramping = _select_places(at, ~at_once)
    _retarget(draft, table, ramping, np.zeros(len(ramping[0]), np.float32), chosen[~at_once])
    draft.pruning[ramping] = True


def _select_places(at: Places, chosen: Bools) -> Places:
    return at[0][chosen], at[1][chosen]


def _enter(draft: SeedTable, at: Places, stage: Stage) -> None:
    draft.stage[at] = stage
    draft.stage_age[at] = 1


def _germinate(draft: SeedTable, at: Places, chosen: Ints) -> None:
    """A new seed; its ramp is laid out, and starts when it enters BLENDING."""
    _enter(draft, at, Stage.GERMINATED)
    draft.seed_age[at] = 1
    draft.blueprint[at] = chosen[:, Head.BLUEPRINT]
    draft.blend[at] = chosen[:, Head.BLEND]
    draft.alpha_target[at] = _TARGETS[chosen[:, Head.ALPHA_TARGET]]
    draft.alpha_duration[at] = _TEMPOS[chosen[:, Head.TEMPO]]
    draft.alpha_curve[at] = Curve.LINEAR


def _retarget(draft: SeedTable, table: SeedTable, at: Places, target: Float32s, chosen: Ints) -> None:
    """Alpha leaves its present value for ``target``; the first step of the ramp is this one."""
    holding = table.stage[at] == Stage.HOLDING
    _enter(draft, _select_places(at, holding), Stage.BLENDING)
    draft.alpha_start[at] = table.alpha[at]
    draft.alpha_target[at] = target
    draft.alpha_elapsed[at] = 1
    draft.alpha_duration[at] = _RAMPS[chosen[:, Head.ALPHA_SPEED]]
    draft.alpha_curve[at] = chosen[:, Head.ALPHA_CURVE]


def _release(draft: SeedTable, at: Places) -> None:
    """The seed is gone: the slot enters its cooldown and keeps nothing of it."""
    _enter(draft, at, Stage.PRUNED)
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
        blueprint=np.maximum(table.blueprint, draft.blueprint)[at],
        blend=np.maximum(table.blend, draft.blend)[at],
        cause=np.broadcast_to(np.int8(causes), shape)[at],
        reason=np.broadcast_to(np.int8(reasons), shape)[at],
    )


# How alpha moves from one value to another

SIGMOID_STEEPNESS = 10.0
"""Slope of the logistic curve: at 10 its ends would miss 0 and 1 by .7%, which the rescaling removes."""
LONGEST = max(*TEMPOS, *ALPHA_SPEEDS)


def progress(curve: Curve, fraction: float) -> float:
    """The part of the way that is behind at a ``fraction`` in [0, 1] of the time; it rises from exactly 0 to exactly 1.

    linear x; cosine (1 - cos(pi x)) / 2; sigmoid (f(x) - f(0)) / (f(1) - f(0)), f(x) = 1 / (1 + exp(-k (x - 1/2))).
    """
    if fraction <= 0.0 or fraction >= 1.0:
        return float(fraction >= 1.0)
    if curve is Curve.LINEAR:
        return fraction
    if curve is Curve.COSINE:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0
    first, last = _logistic(0.0), _logistic(1.0)
    return (_logistic(fraction) - first) / (last - first)


def _logistic(fraction: float) -> float:
    return 1.0 / (1.0 + math.exp(-SIGMOID_STEEPNESS * (fraction - 0.5)))


# [curve, duration, elapsed]. A lookup is not only fast: vectorised cos and exp may round by an element's place in the
# array, and then one environment's alpha would depend on how many others there are.
_PROGRESS: Float32s = np.array(
    [
        [
            [progress(curve, elapsed / max(duration, 1)) for elapsed in range(LONGEST + 1)]
            for duration in range(LONGEST + 1)
        ]
        for curve in Curve
    ],
    dtype=np.float32,
)


def alpha_at(start: Float32s, target: Float32s, elapsed: Int16s, duration: Int16s, curve: Int8s) -> Float32s:
    """Alpha ``elapsed`` of ``duration`` steps after it left ``start`` for ``target``, which it reaches exactly.

    All arrays have one shape; durations are 1 to `LONGEST` steps and elapsed is at most the duration.
    """
    moving = start + (target - start) * _PROGRESS[curve, duration, elapsed]
    return np.where(elapsed >= duration, target, moving)
