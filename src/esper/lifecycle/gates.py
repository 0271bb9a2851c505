"""The gates before the forward transitions of a seed. The number 4 is not in use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from esper.arrays import Bools, Int8s
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable

GATES: dict[Stage, str] = {Stage.GERMINATED: "G1", Stage.TRAINING: "G2", Stage.BLENDING: "G3", Stage.HOLDING: "G5"}
"""The gate ahead of a slot, by its stage."""


class Reason(IntEnum):
    """Why a gate let a seed pass, or did not."""

    NO_GATE = 0
    """The gate does not stand before this stage, or the transition needs no gate."""
    PASSED = 1
    NOT_PROBED = 2
    """G1: there is no probe of the seed, or it was not finite."""
    TOO_YOUNG = 3
    """G2: the seed has not trained for long enough."""
    GRADIENT_UNHEALTHY = 4
    """G2: gradients were not measured or are not healthy."""
    ALPHA_MOVING = 5
    """G3: alpha is not yet at its target."""
    NOT_MEASURED = 6
    """G5: the seed's contribution is unknown."""
    STALE = 7
    """G5: the contribution was measured too long ago."""
    HARMFUL = 8
    """G5: the network does better without the seed."""


@dataclass(frozen=True)
class Verdicts:
    """What a gate says of every slot."""

    passed: Bools
    """``[E, S]``."""
    reason: Int8s
    """``[E, S]``, a `Reason`."""


def g1_probed(table: SeedTable, evidence: Evidence) -> Verdicts:
    """GERMINATED -> BLENDING or TRAINING: the new seed was probed."""
    return _judge(table.stage == Stage.GERMINATED, (Reason.NOT_PROBED, evidence.probed))


def g2_trained(table: SeedTable, evidence: Evidence, rules: Rules) -> Verdicts:
    """TRAINING -> BLENDING: the seed trained for long enough and its gradients are healthy."""
    return _judge(
        table.stage == Stage.TRAINING,
        (Reason.TOO_YOUNG, table.stage_age >= rules.min_training_steps),
        (Reason.GRADIENT_UNHEALTHY, evidence.gradient_healthy),
    )


def g3_arrived(table: SeedTable) -> Verdicts:
    """BLENDING -> HOLDING, and a condition of FOSSILIZED: alpha is at its target."""
    guarded = (table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)
    return _judge(guarded, (Reason.ALPHA_MOVING, table.alpha_elapsed >= table.alpha_duration))


def g5_harmless(table: SeedTable, evidence: Evidence, rules: Rules) -> Verdicts:
    """HOLDING -> FOSSILIZED: the seed's contribution is measured, fresh and not harmful."""
    return _judge(
        table.stage == Stage.HOLDING,
        (Reason.NOT_MEASURED, ~np.isnan(evidence.contribution)),
        (Reason.STALE, evidence.contribution_age <= rules.evidence_max_age),
        (Reason.HARMFUL, evidence.contribution >= -rules.harm_tolerance),
    )


def gate_ahead(table: SeedTable, evidence: Evidence, rules: Rules) -> Verdicts:
    """The verdict of the gate ahead of each slot, as in `GATES`."""
    ahead = (
        g1_probed(table, evidence),
        g2_trained(table, evidence, rules),
        g3_arrived(table),
        g5_harmless(table, evidence, rules),
    )
    reason = np.zeros(table.stage.shape, dtype=np.int8)
    for stage, verdicts in zip(GATES, ahead, strict=True):
        reason = np.where(table.stage == stage, verdicts.reason, reason)
    return Verdicts(passed=reason == Reason.PASSED, reason=reason)


def _judge(guarded: Bools, *conditions: tuple[Reason, Bools]) -> Verdicts:
    """The first condition that does not hold gives the reason."""
    reason = np.full(guarded.shape, Reason.PASSED, dtype=np.int8)
    for failure, holds in reversed(conditions):
        reason = np.where(holds, reason, np.int8(failure))
    reason = np.where(guarded, reason, np.int8(Reason.NO_GATE))
    return Verdicts(passed=reason == Reason.PASSED, reason=reason)
