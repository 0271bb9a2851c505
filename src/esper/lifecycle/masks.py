"""Which actions are legal: exact, conditional masks in the order of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, RELEVANT, TEMPOS, Blend, Curve, Head, Op, head_sizes
from esper.lifecycle.arrays import Bools, Int64s
from esper.lifecycle.gates import Verdicts, g3_arrived, gate_ahead
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable

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

    A row for an operation or slot that is itself illegal is all False. Whoever samples head by head from `given`
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
        verdicts = Verdicts(self.grounds.verdicts.passed[index], self.grounds.verdicts.reason[index])
        return ActionMasks(
            self.op[index],
            self.slot[index],
            self.blueprint[index],
            self.blend[index],
            self.tempo[index],
            self.alpha_target[index],
            self.alpha_speed[index],
            self.alpha_curve[index],
            Grounds(self.grounds.table.rows(index), verdicts, self.grounds.rules, self.grounds.affordable[index]),
        )

    def waiting(self, rows: Bools) -> ActionMasks:
        """The same masks with nothing but WAIT in the environments ``rows [E]``."""
        others = ~rows
        op, slot = self.op & others[:, None], self.slot & others[:, None, None]
        op[:, Op.WAIT] = True
        slot[:, Op.WAIT, 0] = True
        return replace(
            self,
            op=op,
            slot=slot,
            blueprint=self.blueprint & others[:, None, None],
            alpha_target=self.alpha_target & others[:, None, None],
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of each head."""
        return head_sizes(self.slot.shape[2], self.blueprint.shape[2])

    @property
    def germination_target(self) -> Bools:
        """``[E, 3]`` alpha targets that the rules allow a new seed."""
        return np.tile(_offered(ALPHA_TARGETS, self.grounds.rules.alpha_targets), (self.environments, 1))

    def given(self, head: Head, op: Int64s, slot: Int64s) -> Bools:
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
        """Marginal masks ``[E, sum(head_sizes)]``: choices that are legal after some legal earlier choices."""
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
    verdicts = gate_ahead(table, evidence, rules)
    dormant = table.stage == Stage.DORMANT
    steerable = ((table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)) & ~table.pruning
    allowed_targets = _offered(ALPHA_TARGETS, rules.alpha_targets)
    retargets = steerable[:, :, None] & allowed_targets & (table.alpha_target[:, :, None] != _TARGETS)

    slot = np.zeros((environments, len(Op), slots), dtype=np.bool_)
    slot[:, Op.WAIT, 0] = True
    slot[:, Op.GERMINATE] = dormant & on_offer.any(axis=2)
    slot[:, Op.ADVANCE] = (table.stage == Stage.TRAINING) & verdicts.passed
    slot[:, Op.SET_ALPHA] = retargets.any(axis=2)
    slot[:, Op.FOSSILIZE] = (table.stage == Stage.HOLDING) & verdicts.passed & g3_arrived(table).passed
    slot[:, Op.PRUNE] = table.live & ~table.pruning
    slot &= _offered(list(Op), rules.operations)[:, None]

    def everywhere(choices: Bools) -> Bools:
        return np.tile(choices, (environments, 1))

    return ActionMasks(
        op=np.any(slot, axis=2),
        slot=slot,
        blueprint=on_offer & slot[:, Op.GERMINATE, :, None],
        blend=everywhere(_offered(list(Blend), rules.blends)),
        tempo=everywhere(_offered(TEMPOS, rules.tempos)),
        alpha_target=(allowed_targets & slot[:, Op.GERMINATE, :, None]) | (retargets & slot[:, Op.SET_ALPHA, :, None]),
        alpha_speed=everywhere(_offered(ALPHA_SPEEDS, rules.alpha_speeds)),
        alpha_curve=everywhere(_offered(list(Curve), rules.alpha_curves)),
        grounds=Grounds(table=table, verdicts=verdicts, rules=rules, affordable=affordable),
    )


def _offered(choices: Sequence[float], allowed: Sequence[float]) -> Bools:
    return np.array([choice in allowed for choice in choices])
