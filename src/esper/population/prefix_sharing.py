"""Several variants of every network in one pass, in which what they have in common is computed once.

A variant is the same network with other alphas of its seeds. All variants enter the host as one block of the batch;
at a slot where some begin to differ, copies of the block are appended to the batch. What lies before it is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.numerics.arrays import Bools, Float32s
from esper.population.execution import SlotOp
from esper.population.forward import ActiveSeeds, build_program, find_slot_seeds
from esper.population.population import Population
from esper.population.slot_ops import BranchingBlendOp, BranchingOp, SlotSeeds


@dataclass(frozen=True)
class SlotBranches:
    """What one slot does to the P blocks of a batch that reach it, of which A leave it twice or more often."""

    parents: Sequence[int]
    """Which block each of the A blocks that the slot appends is a branch of."""
    toggled: Bools
    """``[P + A, E]``: the networks whose seed is toggled here, block by block."""


@dataclass(frozen=True)
class BranchPlan:
    """How V variants spread over the blocks of a batch on their way through S slots."""

    slots: Sequence[SlotBranches]
    """Branches of each slot, in the order in which features pass them."""
    places: Sequence[int]
    """The block in which each variant leaves the last slot, V of them."""

    @property
    def blocks(self) -> int:
        """Blocks that leave the last slot."""
        return len(self.slots[-1].toggled)


def plan_shared_prefixes(toggled: Bools) -> BranchPlan:
    """All variants begin as one block, which branches where they begin to differ; ``toggled`` ``[V, E, S]``."""
    places, slots = [0] * len(toggled), list[SlotBranches]()
    for slot in range(toggled.shape[2]):
        places, branches = _branch(places, toggled[:, :, slot])
        slots.append(branches)
    return BranchPlan(slots, places)


def plan_replicas(toggled: Bools) -> BranchPlan:
    """Every variant has its own block from the start; ``toggled`` ``[V, E, S]``."""
    return BranchPlan([SlotBranches((), toggled[:, :, slot]) for slot in range(toggled.shape[2])], range(len(toggled)))


def _branch(places: Sequence[int], toggled: Bools) -> tuple[list[int], SlotBranches]:
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
    return leaving, SlotBranches(parents, toggled[[example[block] for block in range(len(example))]])


@dataclass(frozen=True)
class Variants:
    """V variants of E networks: in each some of the seeds have another alpha than usual."""

    active: ActiveSeeds
    """The seeds, and their usual alphas."""
    toggled_alpha: Float32s
    """Their other alphas, ``[E, S]``."""
    toggled: Bools
    """Which have those, ``[V, E, S]``; what it says of slots without a seed changes nothing."""


def toggle_slots(population: Population, slots: Sequence[int]) -> Variants:
    """The networks as they are, and then, for each of ``slots``, with that slot's seeds toggled.

    A blended seed is left out; one that is not blended in is put in instead, at full alpha.
    """
    table = population.table
    alpha = np.where(table.blended, table.alpha, np.float32(0))
    other = np.where(table.owning & ~table.blended, np.float32(1), np.float32(0))
    toggled = np.zeros((1 + len(slots), *table.stage.shape), np.bool_)
    for variant, slot in enumerate(slots, start=1):
        toggled[variant, :, slot] = True
    return Variants(ActiveSeeds(table.owning, alpha), other, toggled)


def forward_variants(population: Population, variants: Variants, inputs: Tensor, *, shared: bool) -> Tensor:
    """Outputs ``[E, V, N, ...]`` of all V variants on ``inputs`` ``[E, N, ...]``.

    ``shared``: layers before a slot are computed once for the variants that differ only from there on. Not possible for
    hosts with a skip connection across a slot; there, and as the reference, the whole batch is replicated.
    """
    examples, count = inputs.shape[1], len(variants.toggled)
    plan = plan_shared_prefixes(variants.toggled) if shared else replicate(variants.toggled)

    def slot_op(slot: int, networks: range) -> SlotOp | None:
        branches = plan.slots[slot]
        seeds = find_slot_seeds(population, variants.active, slot, networks)
        if seeds is None:
            return BranchingOp(branches.parents, examples) if branches.parents else None
        alphas = torch.from_numpy(_choose_alphas(variants, branches, seeds, slot)).to(
            population.host.values, non_blocking=True
        )
        return BranchingBlendOp(seeds, alphas, branches.parents, examples)

    batch = inputs if shared else inputs.repeat(1, count, *[1] * (inputs.dim() - 2))
    outputs = build_program(population, slot_op)(batch, population.host.parameters)
    outputs = outputs.view(len(outputs), plan.blocks, examples, *outputs.shape[2:])
    in_order = list(plan.places) == list(range(count))
    return outputs if in_order else outputs[:, torch.tensor(plan.places, device=outputs.device)]


def _choose_alphas(variants: Variants, branches: SlotBranches, seeds: SlotSeeds, slot: int) -> Float32s:
    """``[r, P + A]``: what each seed counts with in each block that leaves the slot."""
    owners = seeds.owners
    usual: Float32s = variants.active.alpha[owners, slot, None]
    other: Float32s = variants.toggled_alpha[owners, slot, None]
    return np.where(branches.toggled[:, owners].T, other, usual)
