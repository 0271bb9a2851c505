"""Networks of one slot each, and the same slots side by side in networks of many."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import step
from esper.numerics.arrays import Bools
from lifecycle.support import random_evidence, sample

ENVIRONMENTS, SLOTS = 6, 100
ALONE = ENVIRONMENTS * SLOTS
"""Networks of one slot each that together have as many."""
STEPS = 40

Array = NDArray[np.generic]
Part = TypeVar("Part", SeedTable, Evidence)


def lived(rules: Rules, compatible: Bools, generator: np.random.Generator) -> SeedTable:
    """The table ``[ALONE, 1]`` of networks that have acted at random for a while, each for itself."""
    table = SeedTable.dormant(ALONE, 1)
    for _ in range(STEPS):
        evidence = random_evidence(ALONE, 1, generator)
        actions = sample(legal_actions(table, evidence, rules, compatible), generator)
        table = step(table, evidence, actions, rules, compatible).table
    return table


def together(array: Array) -> Array:
    """Slots ``[ALONE, 1, ...]`` as those of networks with many, ``[ENVIRONMENTS, SLOTS, ...]``."""
    return array.reshape(ENVIRONMENTS, SLOTS, *array.shape[2:])


def all_together(part: Part) -> Part:
    """The same of a table or of evidence."""
    return type(part)(**{field.name: together(getattr(part, field.name)) for field in fields(part)})
