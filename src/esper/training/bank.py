"""A bank: all seeds of one blueprint in one slot, across the whole population, computed as one grouped call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.growth.blueprints.registry import Blueprint
from esper.stacking import call_stacked
from esper.training.rows import RowBlock, RowShape, pad


@dataclass(frozen=True)
class Bank:
    """R seeds of one blueprint. Like its `RowBlock` it is replaced, never changed, when seeds come or go."""

    template: Blueprint
    """A module of the bank's shapes, called functionally with the rows' values."""
    block: RowBlock
    buffers: Mapping[str, Tensor]
    """The seeds' buffers by name, each ``[R, *shape]``."""

    @classmethod
    def empty(cls, template: Blueprint, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Bank:
        """A bank without seeds; ``template`` is built at the widest site."""
        template = template.to(device=device, dtype=dtype)
        block = RowBlock.empty(RowShape.of(template), moment_names, dtype, device)
        return cls(template, block, {name: buffer.new_zeros(0, *buffer.shape) for name, buffer in _buffers(template)})

    def __len__(self) -> int:
        return len(self.block)

    def extended(self, seeds: Sequence[Blueprint], learning_rates: Tensor, owners: Tensor) -> Bank:
        """This bank and new seeds, padded with zeros where they are narrower than the template."""
        rows = torch.stack([self.block.shape.row(seed) for seed in seeds])
        shapes = {name: buffer.shape for name, buffer in _buffers(self.template)}
        added = [{name: pad(buffer, shapes[name]) for name, buffer in _buffers(seed)} for seed in seeds]
        buffers = {
            name: torch.cat([present, torch.stack([seed[name] for seed in added]).to(present)])
            for name, present in self.buffers.items()
        }
        return replace(self, block=self.block.extended(rows, learning_rates, owners), buffers=buffers)

    def without(self, owners: Tensor) -> Bank:
        """This bank less the seeds of the networks in ``owners``, int64 ``[n]``."""
        kept = torch.isin(self.block.owners, owners, invert=True).nonzero().squeeze(1)
        buffers = {name: buffer[kept.to(buffer.device)] for name, buffer in self.buffers.items()}
        return replace(self, block=self.block.without(owners), buffers=buffers)

    def contributions(self, values: Tensor, rows: Tensor | None, features: Tensor, inputs: Tensor) -> Tensor:
        """What the seeds at ``rows`` (int64 ``[r]``, None: all R) add to their networks' ``features`` ``[r, N, ...]``.

        ``values`` ``[r, P]`` are their parameters, ``inputs`` ``[r, N, ...]`` their networks' inputs.
        """
        parameters = self.block.shape.unflatten(values)
        buffers = {
            name: buffer if rows is None else buffer.index_select(0, rows) for name, buffer in self.buffers.items()
        }
        return call_stacked(self.template, parameters, buffers, features, inputs)


def _buffers(seed: Blueprint) -> list[tuple[str, Tensor]]:
    return list(seed.named_buffers())
