"""Measure every network on held-out data: as it is, with each of its seeds toggled, and without unfinished seeds.

A variant is the same network with other alphas of its seeds. All variants enter the host as one block of the batch. At
a slot where variants start to differ, copies of the block are appended to the batch. This is exact: variants that agree
up to a slot have the same features there, and in evaluation mode a host treats every example separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from esper.engine.measurements import CommittedEvaluation, Evaluation
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Float32s, Floats
from esper.numerics.devices import Deferred, to_arrays
from esper.population.execution import SlotOp
from esper.population.forward import (
    ActiveSeeds,
    BankSlice,
    add_to_rows_in_place,
    append_branches,
    build_passes,
    find_slot_seeds,
    forward,
    gather_rows,
    run_passes,
    select_committed,
)
from esper.population.learning import (
    Batch,
    compute_accuracies,
    compute_label_hits,
    compute_label_losses,
    compute_losses,
)
from esper.population.population import Population


@dataclass(frozen=True)
class SlotBranches:
    """The branches at one slot: P blocks of the batch reach it, P + A leave it, and the last A are appended copies."""

    parents: Sequence[int]
    """Index of the block of which each of the A appended blocks is a copy."""
    toggled: Bools
    """``[P + A, E]``: the networks whose seed is toggled here, block by block."""


@dataclass(frozen=True)
class BranchPlan:
    """How V variants are distributed over the blocks of a batch at S slots."""

    slots: Sequence[SlotBranches]
    """Branches at each slot, in the order in which features pass the slots."""
    places: Sequence[int]
    """The block in which each variant leaves the last slot, V of them."""

    def list_parents(self, slot: int) -> list[int]:
        """For each block appended by a slot before ``slot``, in order, the block of which it is a copy."""
        return [parent for branches in self.slots[:slot] for parent in branches.parents]

    @property
    def blocks(self) -> int:
        """Number of blocks that leave the last slot."""
        return len(self.slots[-1].toggled)


def plan_shared_prefixes(toggled: Bools) -> BranchPlan:
    """A plan in which all variants start as one block that branches where they differ; ``toggled`` ``[V, E, S]``."""
    places, slots = [0] * len(toggled), list[SlotBranches]()
    for slot in range(toggled.shape[2]):
        here = toggled[:, :, slot]
        count = max(places) + 1
        parents: list[int] = []
        # Variants stay together if they arrive in one block and are toggled alike here. The first such group keeps the
        # block's place; each other group gets a copy after all blocks.
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
    """A plan in which every variant has its own block from the start; ``toggled`` ``[V, E, S]``."""
    return BranchPlan([SlotBranches((), toggled[:, :, slot]) for slot in range(toggled.shape[2])], range(len(toggled)))


@dataclass(frozen=True)
class BranchingOp:
    """`BlendOp` for several variants, some of which start to differ at this slot.

    P blocks of N examples reach the slot, ``[E, P * N, ...]``; P + A leave it.
    """

    parents: Sequence[int]
    """Index of the block of which each of the last A blocks is a copy, with other alphas."""
    earlier_parents: Sequence[int]
    """The same for the blocks appended by earlier slots, in order."""
    examples: int
    """N, the number of examples in a block."""
    banks: Sequence[tuple[BankSlice, Tensor, Tensor]]
    """Seeds, their networks' rows ``[r]``, and their alphas in the blocks that leave, ``[r, P + A]``."""

    def __call__(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        outputs = append_branches(features, self.parents, self.examples)
        # Bank by bank, because no gradient has to be gathered, and the data of a few rows stay in the CPU's cache.
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
        """Extend the p blocks ``[r, p * N, ...]`` from earlier in the host to all P at this slot, by copies."""
        earlier = context.shape[1] // self.examples
        if earlier == blocks:
            return context
        origins = list(range(earlier))
        for parent in self.earlier_parents[earlier - 1 :]:
            origins.append(origins[parent])
        return append_branches(context, origins[earlier:], self.examples)


@dataclass(frozen=True)
class Variants:
    """V variants of E networks, in which some of the seeds have another alpha than their default."""

    active: ActiveSeeds
    """The seeds and their default alphas."""
    toggled_alpha: Float32s
    """The other alpha of each seed, ``[E, S]``."""
    toggled: Bools
    """Which seeds have the other alpha, ``[V, E, S]``; in slots without a seed it has no effect."""


def toggle_slots(population: Population, slots: Sequence[int]) -> Variants:
    """The unchanged networks, followed by one variant for each of ``slots``, in which it is toggled.

    Toggling removes a blended seed, and adds a seed that is not blended at full alpha.
    """
    table = population.table
    alpha = np.where(table.blended, table.alpha, np.float32(0))
    toggled_alpha = np.where(table.owning & ~table.blended, np.float32(1), np.float32(0))
    toggled = np.zeros((1 + len(slots), *table.stage.shape), np.bool_)
    for variant, slot in enumerate(slots, start=1):
        toggled[variant, :, slot] = True
    return Variants(ActiveSeeds(table.owning, alpha), toggled_alpha, toggled)


def forward_variants(population: Population, variants: Variants, inputs: Tensor) -> Tensor:
    """Outputs ``[E, V, N, ...]`` of all V variants on ``inputs`` ``[E, N, ...]``.

    Layers before a slot are computed once for variants that differ only from there on. For hosts with a skip
    connection across a slot the batch is replicated.
    """
    most = population.config.examples_per_pass
    if most is not None and inputs.shape[1] > most:
        parts = [forward_variants(population, variants, part) for part in torch.split(inputs, most, 1)]
        return torch.cat(parts, 2)
    examples, count, shared = inputs.shape[1], len(variants.toggled), population.shares_prefixes
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

    outputs = run_passes(build_passes(population, make_slot_op), batch, population.host.parameters)

    # From blocks to variants.
    outputs = outputs.view(len(outputs), plan.blocks, examples, *outputs.shape[2:])
    if list(plan.places) == list(range(count)):
        return outputs
    return outputs.index_select(1, torch.tensor(plan.places).to(outputs.device, non_blocking=True))


EVALUATION_CHUNK = 512
"""Examples per network in one forward pass of committed networks and of Shapley values; it limits memory and does not
change results. Training and validation have the setting `examples_per_pass`."""


def evaluate(population: Population, batch: Batch, due: Bools | None = None) -> Evaluation:
    """Evaluate a population; as `start_evaluation`, but waits for the result."""
    return start_evaluation(population, batch, due).fetch()


@torch.inference_mode()
def start_evaluation(population: Population, batch: Batch, due: Bools | None = None) -> Deferred[Evaluation]:
    """Evaluate all networks and, in the same pass, the leave-one-out counterfactuals of their seeds.

    A network with a blended seed is compared with the same network without it; an isolated seed is added at full alpha.
    Only the slots ``due``, bool ``[E, S]``, are measured (None: all). A slot costs a pass through the layers after it
    if it is due in any network that has a seed there.
    """
    population.execution.train(False)
    due = np.ones(population.table.stage.shape, np.bool_) if due is None else due
    slots = np.flatnonzero((population.table.owning & due).any(axis=0)).tolist()
    logits = forward_variants(population, toggle_slots(population, slots), batch.inputs)
    convert = partial(_compute_contributions, population.table, slots, due)
    return Deferred(score_variants(logits, batch.labels), convert)


def score_variants(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Mean losses in nats, accuracies, and the standard errors of their differences from the first variant's.

    Each is ``[E, V]``; the errors, first those of losses, are NaN for a single example.
    Logits are ``[E, V, N, classes]`` and labels ``[E, N]``, or ``[E, V, N, T, classes]`` and ``[E, N, T]``. All
    variants have the same N examples, so an error is that of the mean of N differences. A sequence is one example.
    """
    shape, count = logits.shape[:2], labels.shape[1]
    logits, labels = logits.flatten(0, 1), labels.repeat_interleave(shape[1], dim=0)

    # Both figures at once, which halves the number of operations.
    figures = torch.stack((compute_label_losses(logits, labels), compute_label_hits(logits, labels)))
    means = figures.mean(2).view(2, *shape)
    by_example = figures.view(2, *shape, count, -1).mean(4)
    differences = by_example - by_example[:, :, :1]
    # Computed by hand, because torch warns about the deviation of a single example.
    squares = (differences - differences.mean(3, keepdim=True)).square().sum(3)
    errors = (squares / (count - 1) / count).sqrt()
    return [*means, *errors]


def _compute_contributions(
    table: SeedTable,
    slots: list[int],
    due: Bools,
    losses: Floats,
    accuracies: Floats,
    loss_errors: Floats,
    accuracy_errors: Floats,
) -> Evaluation:
    """The evaluation from the figures `score_variants` of the networks and of the variant for each slot."""
    by_accuracy, by_loss, accuracy_error, loss_error = np.full((4, *table.stage.shape), np.nan)
    for variant, slot in enumerate(slots, start=1):
        # The variant lacks a blended seed, and has an isolated one.
        sign = np.where(table.blended[:, slot], 1.0, -1.0)
        by_accuracy[:, slot] = sign * (accuracies[:, 0] - accuracies[:, variant])
        by_loss[:, slot] = sign * (losses[:, variant] - losses[:, 0])
        accuracy_error[:, slot], loss_error[:, slot] = accuracy_errors[:, variant], loss_errors[:, variant]
    for figures in (by_accuracy, by_loss, accuracy_error, loss_error):
        figures[~(table.owning & due)] = np.nan
    return Evaluation(losses[:, 0], accuracies[:, 0], by_accuracy, by_loss, accuracy_error, loss_error, due)


@torch.inference_mode()
def evaluate_committed(population: Population, batch: Batch) -> CommittedEvaluation:
    """Evaluate the networks without their unfinished seeds, in chunks that limit memory and do not change results."""
    population.execution.train(False)
    committed, count = select_committed(population), batch.labels.shape[1]
    chunk = min(EVALUATION_CHUNK, population.config.examples_per_pass or EVALUATION_CHUNK)
    parts = torch.split(batch.inputs, chunk, 1), torch.split(batch.labels, chunk, 1)
    accuracies: list[Tensor] = []
    losses: list[Tensor] = []
    for inputs, labels in zip(*parts, strict=True):
        logits = forward(population, committed, inputs)
        accuracies.append(compute_accuracies(logits, labels) * labels.shape[1])
        losses.append(compute_losses(logits, labels) * labels.shape[1])
    accuracy, loss = torch.stack(accuracies).sum(0) / count, torch.stack(losses).sum(0) / count
    return CommittedEvaluation(*to_arrays(accuracy, loss))
