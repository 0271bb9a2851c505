"""Where the variants of a network part ways: what comes before is computed once for all that are still the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Fork:
    """What one slot does to the P blocks of a batch that reach it, of which A leave it twice or more often."""

    parents: Sequence[int]
    """Which block each of the A blocks that the slot appends is a branch of."""
    toggled: Bools
    """``[P + A, E]``: the networks whose seed is toggled here, block by block."""


@dataclass(frozen=True)
class Forks:
    """How V variants spread over the blocks of a batch on their way through S slots."""

    slots: Sequence[Fork]
    """In the order in which features pass them."""
    places: Sequence[int]
    """The block in which each variant leaves the last slot, V of them."""

    @property
    def blocks(self) -> int:
        """Blocks that leave the last slot."""
        return len(self.slots[-1].toggled)


def shared(toggled: Bools) -> Forks:
    """All variants begin as one block, which forks where they begin to differ; ``toggled`` ``[V, E, S]``."""
    places, forks = [0] * len(toggled), list[Fork]()
    for slot in range(toggled.shape[2]):
        places, fork = _parted(places, toggled[:, :, slot])
        forks.append(fork)
    return Forks(forks, places)


def replicated(toggled: Bools) -> Forks:
    """Every variant has its own block from the start; ``toggled`` ``[V, E, S]``."""
    return Forks([Fork((), toggled[:, :, slot]) for slot in range(toggled.shape[2])], range(len(toggled)))


def _parted(places: Sequence[int], toggled: Bools) -> tuple[list[int], Fork]:
    """Where variants at ``places`` go that are ``toggled`` ``[V, E]`` here.

    The first that leaves a block stays in its place, and all like it; others branch off.
    """
    arriving = max(places) + 1
    leaving: list[int] = []
    parents: list[int] = []
    blocks: dict[tuple[int, bytes], int] = {}
    example: dict[int, int] = {}
    for variant, parent in enumerate(places):
        way = (parent, toggled[variant].tobytes())
        if way not in blocks:
            blocks[way] = parent
            if parent in example:
                blocks[way] = arriving + len(parents)
                parents.append(parent)
            example[blocks[way]] = variant
        leaving.append(blocks[way])
    return leaving, Fork(parents, toggled[[example[block] for block in range(len(example))]])
