"""The stages a slot goes through."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from esper.numerics.arrays import Bools


class Stage(IntEnum):
    """Where a slot is in its cycle. One seed lives from GERMINATED until it is FOSSILIZED or PRUNED."""

    DORMANT = 0
    """Empty: a seed may germinate here."""
    GERMINATED = 1
    """The seed was just made and is probed; it does not yet count in the forward pass."""
    TRAINING = 2
    """The seed learns in isolation (isolation ``shadow`` only)."""
    BLENDING = 3
    """The seed counts with a weight alpha that moves."""
    HOLDING = 4
    """The seed counts with a steady alpha."""
    FOSSILIZED = 5
    """The seed is part of the host for good."""
    PRUNED = 6
    """The seed was removed; first stage of the cooldown."""
    EMBARGOED = 7
    """Nothing may germinate here for a while."""
    RESETTING = 8
    """Last stage of the cooldown, before DORMANT."""


LIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
"""Stages of an unfinished seed: it can still be pruned."""
OWNING = (*LIVE, Stage.FOSSILIZED)
"""Stages in which the slot owns parameters."""
BLENDED = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
"""Stages in which alpha counts in the forward pass."""
COOLDOWN = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""Stages between the removal of a seed and the next DORMANT, in order."""


def make_stage_lookup(stages: tuple[Stage, ...]) -> Bools:
    """Lookup table ``bool [9]``: index it with an array of stages to ask which of them are among ``stages``."""
    lookup = np.zeros(len(Stage), dtype=np.bool_)
    lookup[list(stages)] = True
    return lookup
