"""Copies of a growing model that are to grow as it does, such as an average of its weights over training (EMA, SWA).

An average is a copy whose tensors are mixed, one by one and in their order, with those of the model. So it must have
the same seeds at any time. A fresh seed in the copy begins as the model's own; its weight, stage and isolation are the
model's; all else is whatever the average makes of it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel
    from esper.growth.slot import Slot


class Copies:
    """The copies of one model; all its slots tell it of every change. A copy of the model has one of its own.

    Copies are known weakly: they live no longer for being known.
    """

    def __init__(self) -> None:
        self.released = False
        """Whether the model to which this belongs has no slots any more, and so cannot grow."""
        self._mirrors: WeakSet[GrowingModel] = WeakSet()
        self._unasked: WeakSet[Copies] = WeakSet()
        """What belongs to copies about which nobody said anything."""
        self._warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = Copies()
        memo[id(self)] = made
        self._unasked.add(made)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()

    def add_mirror(self, mirror: GrowingModel, slots: Iterable[Slot]) -> None:
        """Let ``mirror`` be from now on what the ``slots`` of the model are."""
        self._mirrors.add(mirror)
        self._unasked.discard(mirror.copies)
        for slot in slots:
            self.align(slot)

    @property
    def mirrored(self) -> bool:
        """Whether there are any that are to grow as the model does."""
        return bool(self._mirrors)

    def dismiss(self, other: Copies) -> None:
        """The copy to which ``other`` belongs goes its own way."""
        self._unasked.discard(other)

    def align(self, slot: Slot) -> None:
        """Let the same live in the mirrors as in ``slot`` of the model."""
        for mirror in self._mirrors:
            _align(slot, mirror.slots[slot.name])

    def follow_change(self, slot: Slot) -> None:
        """`align` where a seed came or went; warns once of copies that are no mirrors."""
        self.align(slot)
        if self._warned or all(unasked.released for unasked in self._unasked):
            return
        self._warned = True
        warnings.warn(
            f"what grows in slot {slot.name!r} is not in a copy that was made of the model before: if the copy is an "
            "average of its weights, say model.mirror(average) when you make it; a snapshot needs nothing",
            stacklevel=4,
        )

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Let the mirrors have the values of ``model``, whose training went wrong since."""
        for mirror in self._mirrors:
            for theirs, ours in zip(mirror.parameters(), model.parameters(), strict=True):
                theirs.copy_(ours)
            for theirs, ours in zip(mirror.buffers(), model.buffers(), strict=True):
                theirs.copy_(ours)


def _align(slot: Slot, other: Slot) -> None:
    seed = slot.seed
    if seed is None:
        other.remove()
        return
    present = other.seed
    if present is None or (present.blueprint.name, present.blend) != (seed.blueprint.name, seed.blend):
        other.remove()
        present = other.fit(copy.deepcopy(seed))
        other.occupant = present
        other.depth.follow(other.name, present.blueprint.find_block())
    with torch.no_grad():
        present.alpha.copy_(seed.alpha)
    present.fossilized, present.isolation, present.contribution = seed.fossilized, seed.isolation, seed.contribution
