"""Operations of the slots of a population on the features of all networks in one pass.

A slot op takes features ``[E, N, ...]`` and changes only the rows of networks that have a seed: one gather, one grouped
call per bank, one scatter. So the cost of a slot is that of its seeds, however many networks have none.
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
    """The networks of the seeds, ``[r]``."""
    rows: Tensor | None
    """Rows of the seeds in the bank, int64 ``[r]``; None: all rows, in order."""
    learning: Tensor | None = None
    """Bool ``[r]``: which seeds' parameters get a gradient; None: all."""

    def choose_context(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        """The second argument of the seeds' blueprints; the features again, if they have no context."""
        match self.bank.template.context:
            case Context.NETWORK:
                return inputs
            case Context.HIDDEN:
                assert source is not None, "such seeds grow only where there are hidden units"
                return source
            case _:
                return features

    def compute_contributions(self, features: Tensor, context: Tensor) -> Tensor:
        """The seeds' contributions at full alpha, from the owners' features and the context, all ``[r, N, ...]``."""
        parameters, buffers = self.bank.block.parameters, self.bank.block.buffers
        if self.rows is not None:
            parameters = {name: stacked.index_select(0, self.rows) for name, stacked in parameters.items()}
            buffers = {name: stacked.index_select(0, self.rows) for name, stacked in buffers.items()}
        if self.learning is not None:
            parameters = {
                name: torch.where(_align_rows(self.learning, stacked), stacked, stacked.detach())
                for name, stacked in parameters.items()
            }
        return self.bank.call(parameters, buffers, features, context)


@dataclass(frozen=True)
class SlotSeeds:
    """The seeds of one slot that take part in a pass, all banks together: r seeds of r different networks."""

    slices: Sequence[BankSlice]
    rows: Tensor
    """Rows of the features that the seeds change, int64 ``[r]``: the owners, counted from the pass's first network."""

    @property
    def owners(self) -> Ints:
        """The networks they belong to, ``[r]``."""
        return np.concatenate([part.owners for part in self.slices])

    @property
    def sizes(self) -> list[int]:
        """Number of seeds of each bank."""
        return [len(part.owners) for part in self.slices]


@dataclass(frozen=True)
class BlendOp:
    """``features + alpha * contribution`` for the networks that have a seed."""

    seeds: SlotSeeds
    alpha: Tensor
    """``[r]``."""

    def __call__(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        seeds = self.seeds
        # One gather for all banks, because its backward pass is a costly scatter over all networks.
        feature_parts = torch.split(gather_rows(features, seeds.rows), seeds.sizes)
        parts = zip(seeds.slices, feature_parts, torch.split(seeds.rows, seeds.sizes), strict=True)
        contributions: list[Tensor] = []
        for part, h, rows in parts:
            context = part.choose_context(features, inputs, source)
            contributions.append(
                part.compute_contributions(h, h if context is features else gather_rows(context, rows))
            )

        # Joined in the features' memory order, so that the scatter need not copy.
        order = _memory_order(features)
        joined = _undo_permute(torch.cat([contribution.permute(order) for contribution in contributions]), order)
        return add_to_rows(features, seeds.rows, _align_rows(self.alpha, joined) * joined)


def gather_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]`` along axis 0, with the memory layout of ``tensor``.

    Hosts and seeds keep narrow features channel-major, whatever the order of the axes; a plain gather would undo that.
    """
    order = _memory_order(tensor)
    return _undo_permute(tensor.permute(order).index_select(0, rows), order)


def add_to_rows(tensor: Tensor, rows: Tensor, addends: Tensor) -> Tensor:
    """``tensor`` with ``addends`` ``[r, ...]`` added at ``rows``, with the memory layout of ``tensor``."""
    order = _memory_order(tensor)
    # Under autocast some blueprints compute in float32; the host expects its own dtype.
    return _undo_permute(tensor.permute(order).index_add(0, rows, addends.permute(order).to(tensor.dtype)), order)


def add_to_rows_in_place(tensor: Tensor, rows: Tensor, addends: Tensor) -> None:
    """Add ``addends`` ``[r, ...]`` to ``tensor`` at ``rows``."""
    order = _memory_order(tensor)
    tensor.permute(order).index_add_(0, rows, addends.permute(order).to(tensor.dtype))


def append_branches(batch: Tensor, parents: Sequence[int], examples: int) -> Tensor:
    """A copy of ``batch`` with copies of its blocks ``parents`` appended along axis 1.

    A block has ``examples`` entries. The result has the memory layout of ``batch``.
    """
    order = _memory_order(batch)
    axis, permuted = order.index(1), batch.permute(order)
    branches = [permuted.narrow(axis, parent * examples, examples) for parent in parents]
    return _undo_permute(torch.cat([permuted, *branches], dim=axis), order)


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes in order of decreasing stride, with axis 0 first."""
    return [0, *sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))]


def _undo_permute(permuted: Tensor, order: list[int]) -> Tensor:
    return permuted.permute([order.index(axis) for axis in range(len(order))])


def _align_rows(by_row: Tensor, tensor: Tensor) -> Tensor:
    """Reshape ``[r]`` to ``[r, 1, ...]``, for broadcasting over ``tensor``."""
    return by_row.view(-1, *[1] * (tensor.dim() - 1))
