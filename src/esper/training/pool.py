"""A pool: the rows of many blocks in one flat vector, so that an optimizer step is a few operations on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.training.rows import RowBlock


@dataclass(frozen=True)
class Pool:
    """R rows of several blocks, V values in all, in the order of ``blocks``."""

    blocks: Sequence[RowBlock]
    """Views of the pool: what changes here changes there."""
    values: Tensor
    """``[V]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[V]``."""
    steps: Tensor
    """``[R]``, as the other fields of `RowBlock`."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """int64 ``[R]``."""
    row_of_value: Tensor
    """The row of each value, int64 ``[V]``."""

    @classmethod
    def of(cls, blocks: Sequence[RowBlock]) -> Pool:
        """A pool with copies of ``blocks``."""
        values = flat([block.values for block in blocks])
        moments = {name: flat([block.moments[name] for block in blocks]) for name in blocks[0].moments}
        steps = torch.cat([block.steps for block in blocks])
        learning_rates = torch.cat([block.learning_rates for block in blocks])
        owners = torch.cat([block.owners for block in blocks])
        widths = torch.cat([block.owners.new_full((len(block),), block.shape.size) for block in blocks])
        row_of_value = torch.arange(len(owners)).repeat_interleave(widths).to(values.device, non_blocking=True)
        views = _views(blocks, values, moments, steps)
        return cls(views, values, moments, steps, learning_rates, owners, row_of_value)

    def spread(self, by_row: Tensor) -> Tensor:
        """``[R]`` to ``[V]``: each row's number for each of its values."""
        return by_row.index_select(0, self.row_of_value)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor ``[R, P]`` per block as a vector ``[V]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _views(blocks: Sequence[RowBlock], values: Tensor, moments: Mapping[str, Tensor], steps: Tensor) -> list[RowBlock]:
    views: list[RowBlock] = []
    value, row = 0, 0
    for block in blocks:
        part, rows = slice(value, value + block.values.numel()), slice(row, row + len(block))
        views.append(
            replace(
                block,
                values=values[part].view_as(block.values),
                moments={name: moment[part].view_as(block.values) for name, moment in moments.items()},
                steps=steps[rows],
            )
        )
        value, row = part.stop, rows.stop
    return views
