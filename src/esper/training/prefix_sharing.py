"""Several variants of every network in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.training.execution import Graft
from esper.training.forward import Participation, program, slot_seeds
from esper.training.population import Population
from esper.training.slot_ops import Copied, Forking, SlotSeeds

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


def share_prefixes(toggled: Bools) -> Forks:
    """All variants begin as one block, which forks where they begin to differ; ``toggled`` ``[V, E, S]``."""
    places, forks = [0] * len(toggled), list[Fork]()
    for slot in range(toggled.shape[2]):
        places, fork = _parted(places, toggled[:, :, slot])
        forks.append(fork)
    return Forks(forks, places)


def replicate(toggled: Bools) -> Forks:
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


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Variants:
    """V variants of E networks: in each some of the seeds have another alpha than usual."""

    participation: Participation
    """The seeds, and their usual alphas."""
    toggled_alpha: Floats
    """Their other alphas, ``[E, S]``."""
    toggled: Bools
    """Which have those, ``[V, E, S]``; what it says of slots without a seed changes nothing."""


def toggling(population: Population, slots: Sequence[int]) -> Variants:
    """The networks as they are, and then, for each of ``slots``, with that slot's seeds toggled.

    A blended seed is left out; one that is not blended in is put in instead, at full alpha.
    """
    table = population.table
    alpha = np.where(table.blended, table.alpha, np.float32(0))
    other = np.where(table.owning & ~table.blended, np.float32(1), np.float32(0))
    toggled = np.zeros((1 + len(slots), *table.stage.shape), np.bool_)
    for variant, slot in enumerate(slots, start=1):
        toggled[variant, :, slot] = True
    return Variants(Participation(table.owning, alpha), other, toggled)


def forward_variants(population: Population, variants: Variants, inputs: Tensor, *, shared: bool) -> Tensor:
    """Outputs ``[E, V, N, ...]`` of all V variants on ``inputs`` ``[E, N, ...]``.

    ``shared``: layers before a slot are computed once for the variants that differ only from there on. Not possible for
    hosts with a skip connection across a slot; there, and as the reference, the whole batch is replicated.
    """
    examples, count = inputs.shape[1], len(variants.toggled)
    forks = share_prefixes(variants.toggled) if shared else replicate(variants.toggled)

    def graft(slot: int, networks: range) -> Graft | None:
        fork = forks.slots[slot]
        seeds = slot_seeds(population, variants.participation, slot, networks)
        if seeds is None:
            return Copied(fork.parents, examples) if fork.parents else None
        alphas = torch.from_numpy(_alphas(variants, fork, seeds, slot)).to(population.host.values, non_blocking=True)
        return Forking(seeds, alphas, fork.parents, examples)

    batch = inputs if shared else inputs.repeat(1, count, *[1] * (inputs.dim() - 2))
    outputs = program(population, graft)(batch, population.host.parameters)
    outputs = outputs.view(len(outputs), forks.blocks, examples, *outputs.shape[2:])
    in_order = list(forks.places) == list(range(count))
    return outputs if in_order else outputs[:, torch.tensor(forks.places, device=outputs.device)]


def _alphas(variants: Variants, fork: Fork, seeds: SlotSeeds, slot: int) -> Floats:
    """``[r, P + A]``: what each seed counts with in each block that leaves the slot."""
    owners = seeds.owners
    usual, other = variants.participation.alpha[owners, slot], variants.toggled_alpha[owners, slot]
    return np.where(fork.toggled[:, owners].T, other[:, None], usual[:, None])
