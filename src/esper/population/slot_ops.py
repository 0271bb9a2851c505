"""What the slots of a population do to the features in one kind of forward pass.

A slot op works on the features of all networks at once, ``[E, N, ...]``, and touches only the rows that own a seed:
gather, one grouped call per bank, one scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.growth.blueprints.registry import Context
from esper.numerics.arrays import Ints
from esper.population.parameters import SeedBank


@dataclass(frozen=True)
class BankSlice:
    """The seeds of one bank that take part in a pass."""

    bank: SeedBank
    owners: Ints
    """The networks they belong to, ``[r]``."""
    rows: Tensor | None
    """Their rows in the bank, int64 ``[r]``; None: all of them, in order."""
    learning: Tensor | None = None
    """Bool ``[r]``: whose parameters get a gradient; None: all of them."""

    def contributions(self, features: Tensor, inputs: Tensor) -> Tensor:
        """``[r, N, ...]`` of the owners' features and inputs ``[r, N, ...]``."""
        parameters, buffers = self.bank.block.parameters, self.bank.block.buffers
        if self.rows is not None:
            parameters = {name: stacked.index_select(0, self.rows) for name, stacked in parameters.items()}
            buffers = {name: stacked.index_select(0, self.rows) for name, stacked in buffers.items()}
        if self.learning is not None:
            parameters = {
                name: torch.where(_broadcast_rows(self.learning, stacked), stacked, stacked.detach())
                for name, stacked in parameters.items()
            }
        return self.bank.call(parameters, buffers, features, inputs)


@dataclass(frozen=True)
class SlotSeeds:
    """The seeds of one slot that take part in a pass, all banks together: r seeds of r different networks."""

    calls: Sequence[BankSlice]
    environments: Tensor
    """The rows of the features they work on, int64 ``[r]``: the owners, counted from the pass's first network."""

    @property
    def owners(self) -> Ints:
        """The networks they belong to, ``[r]``."""
        return np.concatenate([call.owners for call in self.calls])

    def contributions(self, features: Tensor, inputs: Tensor) -> Tensor:
        """``[r, N, ...]`` of all networks' features and inputs ``[E, N, ...]``, in the order of ``environments``."""
        counts = [len(call.owners) for call in self.calls]
        # One gather for all banks: its backward pass is a scatter over all networks, which none should pay twice.
        parts = torch.split(gather(features, self.environments), counts)
        reading = any(call.bank.template.context is Context.NETWORK for call in self.calls)
        seen = torch.split(gather(inputs, self.environments), counts) if reading else parts
        contributions = [call.contributions(part, own) for call, part, own in zip(self.calls, parts, seen, strict=True)]
        order = _memory_order(features)
        return _undo_permute(torch.cat([contribution.permute(order) for contribution in contributions]), order)


@dataclass(frozen=True)
class BlendOp:
    """``features + alpha * contribution`` for the networks that own a seed."""

    seeds: SlotSeeds
    alpha: Tensor
    """``[r]``."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        contributions = self.seeds.contributions(features, inputs)
        return scatter_add(
            features, self.seeds.environments, _broadcast_rows(self.alpha, contributions) * contributions
        )


@dataclass(frozen=True)
class BranchingBlendOp:
    """As `BlendOp` for a batch of several variants, some of which begin to differ at this slot.

    P blocks of N examples reach the slot, ``[E, P * N, ...]``; P + A leave it. What lies before it, and the seeds'
    contributions, are thus computed once for all variants that differ only here or later.
    """

    seeds: SlotSeeds
    alphas: Tensor
    """``[r, P + A]``: what the seeds count with in the blocks that leave."""
    parents: Sequence[int]
    """The block that each of the A last ones is a copy of, but for its alphas."""
    examples: int
    """N."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        leaving = append_branches(features, self.parents, self.examples)
        counts = [len(call.owners) for call in self.seeds.calls]
        rows, alphas = torch.split(self.seeds.environments, counts), torch.split(self.alphas, counts)
        # Bank by bank, as no gradient has to be gathered: what few rows need stays in the processor's cache.
        for call, own, weights in zip(self.seeds.calls, rows, alphas, strict=True):
            contributions = self._contributions(call, own, features, inputs)
            added = append_branches(contributions, self.parents, self.examples)
            added.unflatten(1, (-1, self.examples)).mul_(weights.view(*weights.shape, *[1] * (added.dim() - 1)))
            add_in_place(leaving, own, added)
        return leaving

    def _contributions(self, call: BankSlice, rows: Tensor, features: Tensor, inputs: Tensor) -> Tensor:
        """``[r, P * N, ...]`` of the networks ``rows``, int64 ``[r]``."""
        seen = gather(features, rows)
        if call.bank.template.context is not Context.NETWORK:
            return call.contributions(seen, seen)
        own = gather(inputs, rows)
        return call.contributions(seen, own.repeat(1, seen.shape[1] // own.shape[1], *[1] * (own.dim() - 2)))


@dataclass(frozen=True)
class BranchingOp:
    """A slot without seeds at which other networks' variants begin to differ; arguments as `BranchingBlendOp`."""

    parents: Sequence[int]
    examples: int

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        return append_branches(features, self.parents, self.examples)


def gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]`` along axis 0, laid out in memory as ``tensor`` is.

    Hosts and seeds hold narrow features channel-major, whatever the order of the axes; a plain gather would undo that.
    """
    order = _memory_order(tensor)
    return _undo_permute(tensor.permute(order).index_select(0, rows), order)


def scatter_add(tensor: Tensor, rows: Tensor, addends: Tensor) -> Tensor:
    """``tensor`` with ``addends`` ``[r, ...]`` added at ``rows``, laid out in memory as ``tensor`` is."""
    order = _memory_order(tensor)
    return _undo_permute(tensor.permute(order).index_add(0, rows, addends.permute(order)), order)


def add_in_place(tensor: Tensor, rows: Tensor, addends: Tensor) -> None:
    """Add ``addends`` ``[r, ...]`` to ``tensor`` at ``rows``."""
    order = _memory_order(tensor)
    tensor.permute(order).index_add_(0, rows, addends.permute(order))


def append_branches(batch: Tensor, parents: Sequence[int], examples: int) -> Tensor:
    """A copy of ``batch`` and, along axis 1, of its blocks ``parents``, laid out in memory as ``batch`` is.

    A block has ``examples`` entries.
    """
    order = _memory_order(batch)
    axis, whole = order.index(1), batch.permute(order)
    branches = [whole.narrow(axis, parent * examples, examples) for parent in parents]
    return _undo_permute(torch.cat([whole, *branches], dim=axis), order)


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes by falling stride, axis 0 first."""
    return [0, *sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))]


def _undo_permute(permuted: Tensor, order: list[int]) -> Tensor:
    return permuted.permute([order.index(axis) for axis in range(len(order))])


def _broadcast_rows(alpha: Tensor, contributions: Tensor) -> Tensor:
    return alpha.view(-1, *[1] * (contributions.dim() - 1))
