"""What the slots of a population do to the features in one kind of forward pass.

A graft works on the features of all networks at once, ``[E, N, ...]``, and touches only the rows that own a seed:
gather, one grouped call per bank, one scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.training.bank import Bank


@dataclass(frozen=True)
class BankCall:
    """The seeds of one bank that take part in a pass."""

    bank: Bank
    owners: NDArray[np.int64]
    """The networks they belong to, ``[r]``."""
    rows: Tensor | None
    """Their rows in the bank, int64 ``[r]``; None: all of them, in order."""
    learning: Tensor | None = None
    """Bool ``[r, 1]``: whose parameters get a gradient; None: all of them."""

    def contributions(self, features: Tensor, inputs: Tensor) -> Tensor:
        """``[r, N, ...]`` of the owners' features and inputs ``[r, N, ...]``."""
        values = self.bank.block.values if self.rows is None else self.bank.block.values.index_select(0, self.rows)
        if self.learning is not None:
            values = torch.where(self.learning, values, values.detach())
        return self.bank.contributions(values, self.rows, features, inputs)


@dataclass(frozen=True)
class SlotSeeds:
    """The seeds of one slot that take part in a pass, all banks together: r seeds of r different networks."""

    calls: Sequence[BankCall]
    environments: Tensor
    """The rows of the features they work on, int64 ``[r]``: the owners, or 0 where a network runs alone."""

    @property
    def owners(self) -> NDArray[np.int64]:
        """The networks they belong to, ``[r]``."""
        return np.concatenate([call.owners for call in self.calls])

    def contributions(self, features: Tensor, inputs: Tensor) -> Tensor:
        """``[r, N, ...]`` of all networks' features and inputs ``[E, N, ...]``, in the order of ``environments``."""
        counts = [len(call.owners) for call in self.calls]
        # One gather for all banks: its backward pass is a scatter over all networks, which none should pay twice.
        parts = torch.split(gather(features, self.environments), counts)
        reading = any(call.bank.template.reads_inputs for call in self.calls)
        seen = torch.split(gather(inputs, self.environments), counts) if reading else parts
        contributions = [call.contributions(part, own) for call, part, own in zip(self.calls, parts, seen, strict=True)]
        order = _memory_order(features)
        return _restored(torch.cat([contribution.permute(order) for contribution in contributions]), order)


class Graft(Protocol):
    """Rewrites the features ``[E, N, ...]`` of a population at one slot."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Blended:
    """``features + alpha * contribution`` for the networks that own a seed."""

    seeds: SlotSeeds
    alpha: Tensor
    """``[r]``."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        contributions = self.seeds.contributions(features, inputs)
        return scatter_add(features, self.seeds.environments, _along(self.alpha, contributions) * contributions)


@dataclass(frozen=True)
class Estranged:
    """As `Blended` where some seeds learn by the straight-through estimator (Bengio et al. 2013).

    They read detached features, and their output is taken back from the value, but not from the gradient.
    """

    seeds: SlotSeeds
    alpha: Tensor
    """``[r]``; that of estranged seeds is not read."""
    apart: Tensor
    """Bool ``[r]``: which are estranged."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        nobody = features.new_zeros(len(features), dtype=torch.bool)
        own = nobody.index_fill(0, self.seeds.environments[self.apart], True)
        seen = torch.where(_along(own, features), features.detach(), features)
        contributions = self.seeds.contributions(seen, inputs)
        blended = _along(self.alpha, contributions) * contributions
        estranged = contributions - contributions.detach()
        added = torch.where(_along(self.apart, contributions), estranged, blended)
        return scatter_add(features, self.seeds.environments, added)


@dataclass(frozen=True)
class Forking:
    """As `Blended` for a batch of several variants, some of which begin to differ at this slot.

    P blocks of N examples reach the slot, ``[E, P * N, ...]``; P + A leave it. What lies before it, and the seeds'
    contributions, are thus computed once for all variants that differ only here or later.
    """

    seeds: SlotSeeds
    alphas: Tensor
    """``[r, P + A]``: what the seeds count with in the blocks that leave."""
    parents: Sequence[int]
    """Of which block each of the A last ones is a copy, but for its alphas."""
    examples: int
    """N."""

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        contributions = self.seeds.contributions(features, _repeated(inputs, features.shape[1] // inputs.shape[1]))
        arriving = features.shape[1] // self.examples
        staying = self._blended(features, self.alphas[:, :arriving], contributions)
        if not self.parents:
            return staying
        own = blocks(contributions, self.parents, self.examples)
        copies = blocks(features, self.parents, self.examples)
        return append(staying, self._blended(copies, self.alphas[:, arriving:], own))

    def _blended(self, features: Tensor, alphas: Tensor, contributions: Tensor) -> Tensor:
        """With alphas ``[r, k]`` for k blocks."""
        weights = alphas.repeat_interleave(self.examples, dim=1)
        weights = weights.view(*weights.shape, *[1] * (contributions.dim() - 2))
        return scatter_add(features, self.seeds.environments, weights * contributions)


@dataclass(frozen=True)
class Copied:
    """A slot without seeds at which other networks' variants begin to differ; arguments as `Forking`."""

    parents: Sequence[int]
    examples: int

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        return append(features, blocks(features, self.parents, self.examples))


def gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]`` along axis 0, laid out in memory as ``tensor`` is.

    Hosts and seeds hold narrow features channel-major, whatever the order of the axes; a plain gather would undo that.
    """
    order = _memory_order(tensor)
    return _restored(tensor.permute(order).index_select(0, rows), order)


def scatter_add(tensor: Tensor, rows: Tensor, addends: Tensor) -> Tensor:
    """``tensor`` with ``addends`` ``[r, ...]`` added at ``rows``, laid out in memory as ``tensor`` is."""
    order = _memory_order(tensor)
    return _restored(tensor.permute(order).index_add(0, rows, addends.permute(order)), order)


def append(batch: Tensor, further: Tensor) -> Tensor:
    """Both concatenated along axis 1, laid out in memory as ``batch`` is."""
    order = _memory_order(batch)
    return _restored(torch.cat([batch.permute(order), further.permute(order)], dim=order.index(1)), order)


def blocks(batch: Tensor, chosen: Sequence[int], examples: int) -> Tensor:
    """The blocks ``chosen`` of ``examples`` entries each along axis 1, laid out in memory as ``batch`` is."""
    first, last = chosen[0], chosen[-1]
    if list(chosen) == list(range(first, last + 1)):
        return batch[:, first * examples : (last + 1) * examples]
    order = _memory_order(batch)
    parts = [batch[:, block * examples : (block + 1) * examples].permute(order) for block in chosen]
    return _restored(torch.cat(parts, dim=order.index(1)), order)


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes by falling stride, axis 0 first."""
    return [0, *sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))]


def _restored(permuted: Tensor, order: list[int]) -> Tensor:
    return permuted.permute([order.index(axis) for axis in range(len(order))])


def _along(alpha: Tensor, contributions: Tensor) -> Tensor:
    return alpha.view(-1, *[1] * (contributions.dim() - 1))


def _repeated(inputs: Tensor, variants: int) -> Tensor:
    return inputs if variants == 1 else inputs.repeat(1, variants, *[1] * (inputs.dim() - 2))
