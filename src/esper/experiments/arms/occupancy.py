"""Which seeds were in which slot while networks trained, told from what happened in their episodes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.experiments.tallies import StageChange, Tally
from esper.lifecycle.actions import Blend, Head
from esper.lifecycle.stages import OWNING, Stage, membership
from esper.lifecycle.table import NO_BLUEPRINT
from esper.lifecycle.transitions import Cause
from esper.tasks.suite import Suite
from esper.training.parameters import SeedKind
from esper.training.population import Fossils

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
    blend: Ints
    """``[T, E, S]``: the seed's `Blend`."""
    fossils: list[Fossils]
    """What each network had committed in the end, ``[E]``."""


def occupancy(tally: Tally, suite: Suite, given: Sequence[Fossils] = ()) -> Occupancy:
    """Of finished episodes that began with the fossils ``given``, or with none.

    Rollbacks come after the training of their decision.
    """
    slots = _Slots.given(given, (len(tally.instances), len(suite.sites)))
    decided: list[list[StageChange]] = [[] for _ in tally.steps]
    undone: list[list[StageChange]] = [[] for _ in tally.steps]
    for change in tally.changes:
        (undone if change.cause == _ROLLBACK else decided)[change.step].append(change)
    seen: list[_Slots] = []
    for actions, before, after in zip(tally.steps, decided, undone, strict=True):
        slots.apply(before, suite, actions)
        seen.append(copy.deepcopy(slots))
        slots.apply(after, suite, actions)
    return Occupancy(
        np.stack([one.stage for one in seen]),
        np.stack([one.blueprint for one in seen]),
        np.stack([one.blend for one in seen]),
        [slots.fossils(network) for network in range(len(tally.instances))],
    )


@dataclass
class _Slots:
    """As they are at one time, each ``[E, S]``."""

    stage: Ints
    blueprint: Ints
    blend: Ints

    @classmethod
    def given(cls, fossils: Sequence[Fossils], shape: tuple[int, int]) -> _Slots:
        blank = np.zeros(shape, np.int64)
        slots = cls(np.full_like(blank, Stage.DORMANT), np.full_like(blank, NO_BLUEPRINT), blank)
        for network, own in enumerate(fossils):
            for slot, blueprint, blend in own:
                slots.stage[network, slot] = Stage.FOSSILIZED
                slots.blueprint[network, slot], slots.blend[network, slot] = blueprint, blend
        return slots

    def apply(self, changes: Sequence[StageChange], suite: Suite, actions: Ints) -> None:
        """Carry out changes of stage; what germinated has the blend that ``actions [E, 8]`` chose."""
        for change in changes:
            where, now = (change.environment, change.slot), Stage[change.after.upper()]
            self.stage[where] = now
            named = _OWNING[now] and change.blueprint is not None
            self.blueprint[where] = suite.blueprints.index(change.blueprint) if named else NO_BLUEPRINT
            if now is Stage.GERMINATED:
                self.blend[where] = actions[change.environment, Head.BLEND]

    def fossils(self, network: int) -> Fossils:
        kept: list[int] = np.flatnonzero(self.stage[network] == Stage.FOSSILIZED).tolist()
        own = self.blueprint[network], self.blend[network]
        return tuple(SeedKind(slot, int(own[0][slot]), Blend(own[1][slot])) for slot in kept)
