"""Several variants of every network in one pass, in which what they have in common is computed once.

A variant is the same network with other alphas of its seeds. All variants enter the host as one block of the batch;
at a slot where some begin to differ, copies of the block are appended to the batch. That is exact: variants that agree
up to a slot have the same features there, and in evaluation mode a host treats every example by itself.
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
from esper.population.slot_ops import BankSlice, add_to_rows_in_place, append_branches, gather_rows


@dataclass(frozen=True)
class SlotBranches:
    """What one slot does to the P blocks of a batch that reach it: A of the P + A that leave it are appended copies."""

    parents: Sequence[int]
    """The block that each of the A appended ones is a copy of."""
    toggled: Bools
    """``[P + A, E]``: the networks whose seed is toggled here, block by block."""


@dataclass(frozen=True)
class BranchPlan:
    """How V variants spread over the blocks of a batch on their way through S slots."""

    slots: Sequence[SlotBranches]
    """Branches of each slot, in the order in which features pass them."""
    places: Sequence[int]
    """The block in which each variant leaves the last slot, V of them."""

    def list_parents(self, slot: int) -> list[int]:
        """The block that each of those was copied from which earlier slots than ``slot`` have appended, in order."""
        return [parent for branches in self.slots[:slot] for parent in branches.parents]

    @property
    def blocks(self) -> int:
        """Blocks that leave the last slot."""
        return len(self.slots[-1].toggled)


def plan_shared_prefixes(toggled: Bools) -> BranchPlan:
    """All variants begin as one block, which branches where they begin to differ; ``toggled`` ``[V, E, S]``."""
    places, slots = [0] * len(toggled), list[SlotBranches]()
    for slot in range(toggled.shape[2]):
        here = toggled[:, :, slot]
        count = max(places) + 1
        parents: list[int] = []
        # Variants stay together if they arrive in one block and are toggled alike here. The first such group keeps the
        # block's place; each other one gets a copy behind all blocks.
        blocks: dict[tuple[int, bytes], int] = {}
        example: dict[int, int] = {}
        for variant, parent in enumerate(places):
            group = (parent, here[variant].tobytes())
            if group not in blocks:
                blocks[group] = parent
                if parent in example:
                    blocks[group] = count + len(parents)
                    parents.append(parent)
                example[blocks[group]] = variant
        places = [blocks[parent, here[variant].tobytes()] for variant, parent in enumerate(places)]
        slots.append(SlotBranches(parents, here[[example[block] for block in range(len(example))]]))
    return BranchPlan(slots, places)


def plan_replicas(toggled: Bools) -> BranchPlan:
    """Every variant has its own block from the start; ``toggled`` ``[V, E, S]``."""
    return BranchPlan([SlotBranches((), toggled[:, :, slot]) for slot in range(toggled.shape[2])], range(len(toggled)))


@dataclass(frozen=True)
class BranchingOp:
    """As `BlendOp` for a batch of several variants, some of which begin to differ at this slot.

    P blocks of N examples reach the slot, ``[E, P * N, ...]``; P + A leave it. What lies before it, and the seeds'
    contributions, are thus computed once for all variants that differ only here or later.
    """

    parents: Sequence[int]
    """The block that each of the A last ones is a copy of, but for its alphas."""
    earlier_parents: Sequence[int]
    """Likewise of the blocks that earlier slots have appended, in order."""
    examples: int
    """N."""
    banks: Sequence[tuple[BankSlice, Tensor, Tensor]]
    """Seeds, their networks' rows ``[r]``, and their alphas in the blocks that leave, ``[r, P + A]``."""

    def __call__(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        outputs = append_branches(features, self.parents, self.examples)
        # Bank by bank, as no gradient has to be gathered: what few rows need stays in the processor's cache.
        for seeds, rows, alphas in self.banks:
            h = x = gather_rows(features, rows)
            context = seeds.choose_context(features, inputs, source)
            if context is not features:
                x = self._spread(gather_rows(context, rows), h.shape[1] // self.examples)
            added = append_branches(seeds.compute_contributions(h, x), self.parents, self.examples)
            added.unflatten(1, (-1, self.examples)).mul_(alphas.view(*alphas.shape, *[1] * (added.dim() - 1)))
            add_to_rows_in_place(outputs, rows, added)
        return outputs

    def _spread(self, context: Tensor, blocks: int) -> Tensor:
        """The p blocks ``[r, p * N, ...]`` of an earlier place of the host, for all P ``blocks`` that reach this slot.

        Those that were appended in between get what the block has that they were copied from.
        """
        earlier = context.shape[1] // self.examples
        if earlier == blocks:
            return context
        origins = list(range(earlier))
        for parent in self.earlier_parents[earlier - 1 :]:
            origins.append(origins[parent])
        return append_branches(context, origins[earlier:], self.examples)


@dataclass(frozen=True)
class Variants:
    """V variants of E networks: in each some of the seeds have another alpha than by default."""

    active: ActiveSeeds
    """The seeds, and their default alphas."""
    toggled_alpha: Float32s
    """Their other alphas, ``[E, S]``."""
    toggled: Bools
    """Which have those, ``[V, E, S]``; in slots without a seed it changes nothing."""


def toggle_slots(population: Population, slots: Sequence[int]) -> Variants:
    """The networks as they are, and then, for each of ``slots``, with that slot's seeds toggled.

    A blended seed is left out; one that is not blended in is put in instead, at full alpha.
    """
    table = population.table
    alpha = np.where(table.blended, table.alpha, np.float32(0))
    toggled_alpha = np.where(table.owning & ~table.blended, np.float32(1), np.float32(0))
    toggled = np.zeros((1 + len(slots), *table.stage.shape), np.bool_)
    for variant, slot in enumerate(slots, start=1):
        toggled[variant, :, slot] = True
    return Variants(ActiveSeeds(table.owning, alpha), toggled_alpha, toggled)


def forward_variants(population: Population, variants: Variants, inputs: Tensor, *, shared: bool) -> Tensor:
    """Outputs ``[E, V, N, ...]`` of all V variants on ``inputs`` ``[E, N, ...]``.

    ``shared``: layers before a slot are computed once for the variants that differ only from there on. Not possible for
    hosts with a skip connection across a slot; there, and as the reference, the whole batch is replicated.
    """
    most = population.config.examples_per_pass
    if most is not None and inputs.shape[1] > most:
        parts = [forward_variants(population, variants, part, shared=shared) for part in torch.split(inputs, most, 1)]
        return torch.cat(parts, 2)
    examples, count = inputs.shape[1], len(variants.toggled)
    plan = plan_shared_prefixes(variants.toggled) if shared else plan_replicas(variants.toggled)
    batch = inputs if shared else inputs.repeat(1, count, *[1] * (inputs.dim() - 2))

    def make_slot_op(slot: int, networks: range) -> SlotOp | None:
        branches = plan.slots[slot]
        seeds = find_slot_seeds(population, variants.active, slot, networks)
        if seeds is None:
            # The slot may still branch: other networks have seeds here.
            return BranchingOp(branches.parents, (), examples, ()) if branches.parents else None
        # Each seed's alpha in each block that leaves the slot, [r, P + A].
        default: Float32s = variants.active.alpha[seeds.owners, slot, None]
        toggled: Float32s = variants.toggled_alpha[seeds.owners, slot, None]
        alphas = torch.from_numpy(np.where(branches.toggled[:, seeds.owners].T, toggled, default))
        alphas = torch.split(alphas.to(population.host.values, non_blocking=True), seeds.sizes)
        banks = zip(seeds.slices, torch.split(seeds.rows, seeds.sizes), alphas, strict=True)
        return BranchingOp(branches.parents, plan.list_parents(slot), examples, list(banks))

    outputs = build_program(population, make_slot_op)(batch, population.host.parameters)

    # From blocks to variants.
    outputs = outputs.view(len(outputs), plan.blocks, examples, *outputs.shape[2:])
    if list(plan.places) == list(range(count)):
        return outputs
    return outputs.index_select(1, torch.tensor(plan.places).to(outputs.device, non_blocking=True))
