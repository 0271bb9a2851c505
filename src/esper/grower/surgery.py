"""Carry out on a model what the lifecycle's table says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.grower.subject import ModelSubject
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend, Head
from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.lifecycle.transitions import Transitions
from esper.training.population import seed_generator


def carry_out(
    model: GrowingModel, subject: ModelSubject, changes: Transitions, actions: NDArray[np.int64], seed: int
) -> None:
    """Seeds that came in ``changes`` are planted, those that went are removed, those that stay for good fossilized.

    Whatever may fail, which is making a seed, comes first; then nothing has changed yet.
    """
    slots = model.slots.values()
    for place in changes.slot[changes.after == Stage.GERMINATED].tolist():
        generator = seed_generator(seed, place, int(subject.germinations[place]))
        kind = subject.specs.kinds[int(actions[0, Head.BLUEPRINT])]
        slots[place].germinate(kind.name, generator, blend=Blend(int(actions[0, Head.BLEND])))
        subject.germinations[place] += 1
    for place in changes.slot[changes.after == Stage.PRUNED].tolist():
        slots[place].prune()
    for place in changes.slot[changes.after == Stage.FOSSILIZED].tolist():
        slots[place].fossilize()
    fresh = (changes.after == Stage.GERMINATED) | (changes.after == Stage.PRUNED)
    gone = np.zeros((1, len(slots)), np.bool_)
    gone[0, changes.slot[fresh]] = True
    subject.evidence = subject.evidence.without(gone)


def settle(model: GrowingModel, table: SeedTable, isolation: Isolation) -> None:
    """Give every seed the weight that the table says, and let it learn from its second step on."""
    for place, slot in enumerate(model.slots.values()):
        seed = slot.seed
        if seed is None or seed.fossilized:
            continue
        stage = Stage(int(table.stage[0, place]))
        seed.alpha.fill_(float(table.alpha[0, place]))
        seed.isolation = isolation if stage is Stage.TRAINING else Isolation.NONE
        seed.requires_grad_(stage is not Stage.GERMINATED)
        model.copies.align(slot)
