"""Rows: the parameters of many modules of one shape, one flat row each, with their optimizer state beside them.

Whatever owns parameters here, hosts or seeds, is a `RowBlock`. Values and optimizer state are born and die in one call,
so a row can never lack its state nor leave any behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class RowShape:
    """How the named parameters of one module lie in a flat row of P values."""

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module) -> RowShape:
        """The shape of ``module``'s parameters, in their order of registration."""
        return cls({name: parameter.shape for name, parameter in module.named_parameters()})

    @property
    def sizes(self) -> list[int]:
        """Values per parameter."""
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """P."""
        return sum(self.sizes)

    def unflatten(self, values: Tensor) -> dict[str, Tensor]:
        """Flat rows ``[R, P]`` as named stacked parameters ``[R, *shape]``: views."""
        parts: Sequence[Tensor] = torch.split_with_sizes(values, self.sizes, dim=1)
        rows = len(values)
        return {name: part.view(rows, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flatten(self, parameters: Sequence[Tensor]) -> Tensor:
        """Stacked parameters ``[R, *shape]``, in order, as flat rows ``[R, P]``: the inverse of `unflatten`."""
        return torch.cat([parameter.flatten(1) for parameter in parameters], dim=1)

    def row(self, module: nn.Module) -> Tensor:
        """The parameters of a module of these shapes, or of a narrower one padded with zeros, as one flat row ``[P]``.

        Raises:
            ValueError: the module's parameters have other names, or exceed the shapes.
        """
        parameters = dict(module.named_parameters())
        if parameters.keys() != self.shapes.keys():
            raise ValueError(f"parameters {sorted(parameters)} do not match {sorted(self.shapes)}")
        return torch.cat([pad(parameters[name].detach(), shape).flatten() for name, shape in self.shapes.items()])


def pad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` filled up with zeros at the end of every axis to ``shape``; raises ValueError if it exceeds it."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() != len(shape) or any(have > want for have, want in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not fit into {tuple(shape)}")
    widths = [extent for have, want in zip(tensor.shape, shape, strict=True) for extent in (want - have, 0)]
    return F.pad(tensor, widths[::-1])


@dataclass(frozen=True)
class RowBlock:
    """R rows of parameters and all that belongs to them.

    A block's set of rows never changes: `extended` and `without` make a new block, so that whoever owns blocks commits
    a change by one assignment or not at all. Optimizers update the tensors in place.
    """

    shape: RowShape
    values: Tensor
    """``[R, P]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[R, P]``."""
    steps: Tensor
    """Optimizer steps each row has taken, ``[R]``, of the values' type."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """Network index of each row, int64 ``[R]``; on the CPU, like every index that decides what is computed."""

    @classmethod
    def empty(cls, shape: RowShape, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device) -> RowBlock:
        """A block without rows."""
        flat = torch.zeros(0, shape.size, dtype=dtype, device=device)
        per_row = flat.new_zeros(0)
        return cls(
            shape,
            flat,
            {name: flat.clone() for name in moment_names},
            per_row,
            per_row.clone(),
            torch.zeros(0, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.values.shape[0]

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The values by parameter, each ``[R, *shape]``: views of ``values`` that are leaves and require grad.

        As leaves they cost a backward pass nothing; taken apart within the graph, they would cost it a tenth.
        """
        return {name: view.requires_grad_() for name, view in self.shape.unflatten(self.values).items()}

    def extended(self, values: Tensor, learning_rates: Tensor, owners: Tensor) -> RowBlock:
        """This block and ``r`` new rows ``[r, P]`` that have zero moments and no steps taken."""
        count = values.shape[0]
        if values.shape != (count, self.shape.size) or learning_rates.shape != (count,) or owners.shape != (count,):
            raise ValueError(
                f"rows {tuple(values.shape)}, learning rates {tuple(learning_rates.shape)} and owners "
                f"{tuple(owners.shape)} must be [r, {self.shape.size}], [r] and [r]"
            )
        fresh = self.values.new_zeros(count, self.shape.size)
        return RowBlock(
            self.shape,
            torch.cat([self.values, values.to(fresh, non_blocking=True)]),
            {name: torch.cat([moment, fresh]) for name, moment in self.moments.items()},
            torch.cat([self.steps, fresh.new_zeros(count)]),
            torch.cat([self.learning_rates, learning_rates.to(fresh, non_blocking=True)]),
            torch.cat([self.owners, owners]),
        )

    def renewed(self, rows: Tensor, values: Tensor, learning_rates: Tensor) -> RowBlock:
        """This block with other parameters ``[r, P]`` at ``rows``, int64 ``[r]``, that have never been trained."""
        return RowBlock(
            self.shape,
            self.values.index_copy(0, rows, values.to(self.values, non_blocking=True)),
            {name: moment.index_fill(0, rows, 0) for name, moment in self.moments.items()},
            self.steps.index_fill(0, rows, 0),
            self.learning_rates.index_copy(0, rows, learning_rates.to(self.learning_rates, non_blocking=True)),
            self.owners,
        )

    def without(self, owners: Tensor) -> RowBlock:
        """This block less the rows of the networks in ``owners``, int64 ``[n]``."""
        index = torch.isin(self.owners, owners, invert=True).nonzero().squeeze(1)
        on_device = index.to(self.values.device, non_blocking=True)
        return RowBlock(
            self.shape,
            self.values[on_device],
            {name: moment[on_device] for name, moment in self.moments.items()},
            self.steps[on_device],
            self.learning_rates[on_device],
            self.owners[index],
        )
