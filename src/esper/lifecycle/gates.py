"""The gates before the forward transitions of a seed. The number 4 is not in use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage, membership
from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Int8s

GATES: dict[Stage, str] = {Stage.GERMINATED: "G1", Stage.TRAINING: "G2", Stage.BLENDING: "G3", Stage.HOLDING: "G5"}
"""The gate ahead of a slot, by its stage."""
_GUARDED = membership(tuple(GATES))


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


def gate_ahead(table: SeedTable, evidence: Evidence, rules: Rules) -> Verdicts:
    """The verdict of the gate ahead of each slot, as in `GATES`: the first condition that does not hold is its reason.

    Those of G1 stand before BLENDING or TRAINING, of G2 before BLENDING, of G3 before HOLDING, of G5 before FOSSILIZED.
    """
    conditions = (
        (Stage.GERMINATED, evidence.probed, Reason.NOT_PROBED),
        (Stage.TRAINING, table.stage_age >= rules.min_training_steps, Reason.TOO_YOUNG),
        (Stage.TRAINING, evidence.gradient_healthy, Reason.GRADIENT_UNHEALTHY),
        (Stage.BLENDING, table.arrived, Reason.ALPHA_MOVING),
        (Stage.HOLDING, ~np.isnan(evidence.contribution), Reason.NOT_MEASURED),
        (Stage.HOLDING, evidence.contribution_age <= rules.evidence_max_age, Reason.STALE),
        (Stage.HOLDING, evidence.contribution >= -rules.harm_tolerance, Reason.HARMFUL),
    )
    reason = np.where(_GUARDED[table.stage], np.int8(Reason.PASSED), np.int8(Reason.NO_GATE))
    for stage, holds, failure in reversed(conditions):
        reason[(table.stage == stage) & ~holds] = failure
    return Verdicts(passed=reason == Reason.PASSED, reason=reason)
