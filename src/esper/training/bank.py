"""A bank: all seeds of one blueprint and blend in one slot, across the population, computed as one grouped call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from esper.growth.blueprints.registry import Blueprint
from esper.growth.seed import BlendedBlueprint
from esper.training.functional import stacked_call
from esper.training.rows import RowBlock, RowShape, pad

SeedModule: TypeAlias = Blueprint | BlendedBlueprint
"""What `esper.growth.seed.joined` makes: a seed's parameters, and what they change."""


@dataclass(frozen=True)
class Bank:
    """R seeds of one blueprint and blend. Like its `RowBlock` it is replaced, never changed, when seeds come or go."""

    template: SeedModule
    """A module of the bank's shapes."""
    call: Callable[..., Tensor]
    """What seeds add, at full weight, to their networks' features ``[r, N, ...]``, from their parameters and buffers,
    each ``[r, *shape]``, these features, and their networks' inputs ``[r, N, ...]``."""
    block: RowBlock
    buffers: Mapping[str, Tensor]
    """The seeds' buffers by name, each ``[R, *shape]``."""

    @classmethod
    def empty(cls, template: SeedModule, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Bank:
        """A bank without seeds; ``template`` is built at the widest site."""
        template = template.to(device=device, dtype=dtype, non_blocking=True)
        block = RowBlock.empty(RowShape.of(template), moment_names, dtype, device)
        buffers = {name: buffer.new_zeros(0, *buffer.shape) for name, buffer in _buffers(template)}
        return cls(template, stacked_call(template), block, buffers)

    def __len__(self) -> int:
        return len(self.block)

    def extended(self, seeds: Sequence[SeedModule], learning_rates: Tensor, owners: Tensor) -> Bank:
        """This bank and new seeds, padded with zeros where they are narrower than the template."""
        rows = torch.stack([self.block.shape.row(seed) for seed in seeds])
        shapes = {name: buffer.shape for name, buffer in _buffers(self.template)}
        added = [{name: pad(buffer, shapes[name]) for name, buffer in _buffers(seed)} for seed in seeds]
        buffers = {
            name: torch.cat([present, torch.stack([seed[name] for seed in added]).to(present, non_blocking=True)])
            for name, present in self.buffers.items()
        }
        return replace(self, block=self.block.extended(rows, learning_rates, owners), buffers=buffers)

    def without(self, owners: Tensor) -> Bank:
        """This bank less the seeds of the networks in ``owners``, int64 ``[n]``."""
        kept = torch.isin(self.block.owners, owners, invert=True).nonzero().squeeze(1)
        buffers = {name: buffer[kept.to(buffer.device, non_blocking=True)] for name, buffer in self.buffers.items()}
        return replace(self, block=self.block.without(owners), buffers=buffers)


def _buffers(seed: SeedModule) -> list[tuple[str, Tensor]]:
    return list(seed.named_buffers())
