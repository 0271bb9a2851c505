"""All parameters of a population with their optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.blending import Joined
from esper.growth.blueprints.registry import Blueprint
from esper.lifecycle.actions import Blend
from esper.training.execution import stacked_call


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


class SeedKind(NamedTuple):
    """Which seeds have parameters of the same shapes, and are computed alike."""

    slot: int
    """An index, as is the blueprint."""
    blueprint: int
    blend: Blend = Blend.ADD


SeedModule: TypeAlias = Blueprint | Joined
"""What `esper.growth.blending.joined` makes: a seed's parameters, and what they change."""


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


@dataclass(frozen=True)
class Holdings:
    """The hosts' rows, the banks of seeds, and the pool that both are views of."""

    host: RowBlock
    """One row per network."""
    host_buffers: Mapping[str, Tensor]
    """By name, each ``[E, *shape]``."""
    banks: Mapping[SeedKind, Bank]
    """None of them is empty."""
    pool: Pool
    """Of the blocks, in the order of `blocks`."""

    @classmethod
    def pooled(cls, host: RowBlock, host_buffers: Mapping[str, Tensor], banks: Mapping[SeedKind, Bank]) -> Holdings:
        """Copies of all rows, moved into one pool; banks without seeds are dropped."""
        kept = {key: bank for key, bank in banks.items() if len(bank)}
        pool = Pool.of([host, *(bank.block for bank in kept.values())])
        block, *blocks = pool.blocks
        views = {key: replace(bank, block=own) for (key, bank), own in zip(kept.items(), blocks, strict=True)}
        return cls(block, host_buffers, views, pool)

    @property
    def blocks(self) -> list[RowBlock]:
        """Every row block: the hosts' first, then the banks'."""
        return [self.host, *(bank.block for bank in self.banks.values())]

    def renewed_hosts(
        self, rows: Tensor, values: Tensor, learning_rates: Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[RowBlock, dict[str, Tensor]]:
        """The hosts' rows and buffers with those at ``rows``, int64 ``[r]``, replaced and never trained."""
        index = rows.to(self.pool.values.device, non_blocking=True)
        block = self.host.renewed(
            index, values.to(index.device, non_blocking=True), learning_rates.to(index.device, non_blocking=True)
        )
        return block, {
            name: present.index_copy(0, index, buffers[name].to(present, non_blocking=True))
            for name, present in self.host_buffers.items()
        }
