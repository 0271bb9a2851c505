"""Which seeds were in which slot while networks trained, told from what happened in their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.experiments.tallies import StageChange, Tally
from esper.lifecycle.stages import OWNING, Stage, membership
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.tasks.suite import Suite
from esper.training.roster import Fossils

_OWNING = membership(OWNING)
_ROLLBACK = Cause.ROLLBACK.name.lower()

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Occupancy:
    """The slots of E networks over T decisions."""

    stage: Ints
    """``[T, E, S]``: a `Stage`, while the network trained after the decision."""
    blueprint: Ints
    """``[T, E, S]``: an index of the suite's; -1 without a seed."""
    fossils: list[Fossils]
    """What each network had committed in the end, ``[E]``."""


def occupancy(tally: Tally, suite: Suite, given: Sequence[Fossils] = ()) -> Occupancy:
    """Of finished episodes that began with the fossils ``given``, or with none.

    Rollbacks come after the training of their decision.
    """
    shape = (len(tally.instances), len(suite.sites))
    stage, blueprint = np.full(shape, Stage.DORMANT, np.int64), np.full(shape, NO_BLUEPRINT, np.int64)
    for network, fossils in enumerate(given):
        for slot, kind in fossils:
            stage[network, slot], blueprint[network, slot] = Stage.FOSSILIZED, kind
    decided: list[list[StageChange]] = [[] for _ in tally.steps]
    undone: list[list[StageChange]] = [[] for _ in tally.steps]
    for change in tally.changes:
        (undone if change.cause == _ROLLBACK else decided)[change.step].append(change)
    stages: list[Ints] = []
    blueprints: list[Ints] = []
    for before, after in zip(decided, undone, strict=True):
        _apply(before, suite, stage, blueprint)
        stages.append(stage.copy())
        blueprints.append(blueprint.copy())
        _apply(after, suite, stage, blueprint)
    kept = stage == Stage.FOSSILIZED
    return Occupancy(
        np.stack(stages), np.stack(blueprints), [_places(*one) for one in zip(kept, blueprint, strict=True)]
    )


def _places(kept: NDArray[np.bool_], blueprint: Ints) -> Fossils:
    """From one network's slots, both ``[S]``."""
    slots: list[int] = np.flatnonzero(kept).tolist()
    return tuple((slot, int(blueprint[slot])) for slot in slots)


def _apply(changes: Sequence[StageChange], suite: Suite, stage: Ints, blueprint: Ints) -> None:
    """Carry out changes of stage in ``stage`` and ``blueprint``, both ``[E, S]``."""
    for change in changes:
        where, now = (change.environment, change.slot), Stage[change.after.upper()]
        stage[where] = now
        named = _OWNING[now] and change.blueprint is not None
        blueprint[where] = suite.blueprints.index(change.blueprint) if named else NO_BLUEPRINT
