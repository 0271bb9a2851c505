"""All parameters of a population with their optimizer state: one flat vector, with views as stacks of rows.

`StackedParameters` has many modules of one architecture, `SeedBank` the seeds of one kind, and `PopulationParameters`
everything, as views of one `FlatParameters`. A forward pass uses named tensors ``[R, *shape]``. An optimizer step is a
few operations on one vector, whatever the number of networks, layers and seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.blueprints.registry import Blueprint
from esper.growth.slot import BlendedBlueprint
from esper.lifecycle.actions import Blend
from esper.numerics.arrays import Ints
from esper.population.execution import make_stacked_call


@dataclass(frozen=True)
class ParameterLayout:
    """How the named parameters of one module are arranged in a flat row of P values."""

    shapes: Mapping[str, torch.Size]

    @classmethod
    def from_module(cls, module: nn.Module) -> ParameterLayout:
        """The layout of ``module``'s parameters, in their order of registration."""
        return cls({name: parameter.shape for name, parameter in module.named_parameters()})

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter."""
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """P, the number of values in a row."""
        return sum(self.sizes)

    def unflatten(self, values: Tensor) -> dict[str, Tensor]:
        """View flat rows ``[R, P]`` as named stacked parameters ``[R, *shape]``."""
        parts: Sequence[Tensor] = torch.split_with_sizes(values, self.sizes, dim=1)
        rows = len(values)
        return {name: part.view(rows, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flatten_module(self, module: nn.Module) -> Tensor:
        """The parameters of a module as one flat row ``[P]``, padded with zeros if the module is narrower."""
        parameters = dict(module.named_parameters())
        if parameters.keys() != self.shapes.keys():
            raise ValueError(f"parameters {sorted(parameters)} do not match {sorted(self.shapes)}")
        return torch.cat(
            [pad_to_shape(parameters[name].detach(), shape).flatten() for name, shape in self.shapes.items()]
        )


def pad_to_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad ``tensor`` with zeros at the end of every axis to ``shape``; raises ValueError if it exceeds the shape."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() != len(shape) or any(size > limit for size, limit in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not fit into {tuple(shape)}")
    # F.pad starts with the last axis and takes the widths before and after it.
    widths = [width for size, limit in zip(tensor.shape, shape, strict=True) for width in (limit - size, 0)]
    return F.pad(tensor, widths[::-1])


@dataclass(frozen=True)
class StackedParameters:
    """R modules of one architecture, hosts or seeds: each has a row of parameters, optimizer state and buffers.

    Methods return new stacks, so a change is committed by one assignment or not at all. Only optimizers, and forward
    passes that update running statistics, write into the tensors.
    """

    layout: ParameterLayout
    values: Tensor
    """``[R, P]``."""
    buffers: Mapping[str, Tensor]
    """The modules' buffers by name, each ``[R, *shape]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[R, P]``."""
    steps: Tensor
    """Number of optimizer steps that each row has taken, ``[R]``, in the dtype of the values."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """Network index of each row, int64 ``[R]``; on the CPU, like every index that decides what is computed."""

    @classmethod
    def empty(
        cls, module: nn.Module, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> StackedParameters:
        """A stack without rows, with the shapes of ``module``, which must have this dtype and device."""
        layout = ParameterLayout.from_module(module)
        values = torch.zeros(0, layout.size, dtype=dtype, device=device)
        return cls(
            layout,
            values,
            {name: buffer.new_zeros(0, *buffer.shape) for name, buffer in module.named_buffers()},
            {name: values.clone() for name in moment_names},
            values.new_zeros(0),
            values.new_zeros(0),
            torch.zeros(0, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.values.shape[0]

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The values by parameter, each ``[R, *shape]``: views of ``values`` that are leaves and require grad."""
        # As leaves they cost a backward pass nothing. Split within the graph, they would cost it a tenth.
        return {name: view.requires_grad_() for name, view in self.layout.unflatten(self.values).items()}

    def stack_modules(self, modules: Sequence[nn.Module]) -> tuple[Tensor, dict[str, Tensor]]:
        """Stack modules of this architecture, zero-padded if narrower: values ``[r, P]``, buffers ``[r, *shape]``."""
        values = torch.stack([self.layout.flatten_module(module) for module in modules])
        shapes = {name: buffer.shape[1:] for name, buffer in self.buffers.items()}
        return values, {
            name: torch.stack([pad_to_shape(module.get_buffer(name), shape) for module in modules])
            for name, shape in shapes.items()
        }

    def reset_rows(
        self, rows: Tensor, values: Tensor, buffers: Mapping[str, Tensor], learning_rates: Tensor
    ) -> StackedParameters:
        """The stack with new, untrained parameters ``[r, P]`` and buffers at ``rows``, int64 ``[r]``."""
        index = rows.to(self.values.device, non_blocking=True)
        new = self.make_rows(values, buffers, learning_rates, self.owners[rows])
        return self._map_tensors(lambda tensors: tensors[0].index_copy(0, index, tensors[1]), self.owners, new)

    def head(self, count: int) -> StackedParameters:
        """The first ``count`` rows, as views whose named parameters are separate leaves."""
        if count == len(self):
            return self
        return self._map_tensors(lambda tensors: tensors[0][:count], self.owners[:count])

    def select(self, rows: Tensor) -> StackedParameters:
        """Copies of the rows at ``rows``, int64 ``[r]``."""
        index = rows.to(self.values.device, non_blocking=True)
        return self._map_tensors(lambda tensors: tensors[0].index_select(0, index), self.owners[rows])

    def without(self, owners: Tensor) -> StackedParameters:
        """All but the rows of the networks in ``owners``, int64 ``[n]``."""
        return self.select(torch.isin(self.owners, owners, invert=True).nonzero().squeeze(1))

    def make_rows(
        self, values: Tensor, buffers: Mapping[str, Tensor], learning_rates: Tensor, owners: Tensor
    ) -> StackedParameters:
        """Rows of this architecture, dtype and device, with zero moments and no steps taken."""
        count = values.shape[0]
        assert values.shape == (count, self.layout.size)
        assert learning_rates.shape == owners.shape == (count,)
        zeros = self.values.new_zeros(count, self.layout.size)
        return StackedParameters(
            self.layout,
            values.to(zeros, non_blocking=True),
            {name: buffers[name].to(buffer, non_blocking=True) for name, buffer in self.buffers.items()},
            dict.fromkeys(self.moments, zeros),
            zeros.new_zeros(count),
            learning_rates.to(zeros, non_blocking=True),
            owners,
        )

    def _map_tensors(
        self, function: Callable[[list[Tensor]], Tensor], owners: Tensor, *stacks: StackedParameters
    ) -> StackedParameters:
        """Apply ``function`` to each tensor and its counterparts in ``stacks``; the new rows have these ``owners``."""
        stacks = (self, *stacks)
        return StackedParameters(
            self.layout,
            function([stack.values for stack in stacks]),
            {name: function([stack.buffers[name] for stack in stacks]) for name in self.buffers},
            {name: function([stack.moments[name] for stack in stacks]) for name in self.moments},
            function([stack.steps for stack in stacks]),
            function([stack.learning_rates for stack in stacks]),
            owners,
        )


class Piece(NamedTuple):
    """Selected rows of one block, in one of several flat vectors."""

    source: int
    """Index of the vector."""
    block: int
    """Index of the block in that vector."""
    rows: Ints
    """int64 ``[r]``."""


@dataclass(frozen=True)
class FlatParameters:
    """The rows of several stacks in one flat vector: R rows, V values in all, in the order of ``blocks``."""

    blocks: Sequence[StackedParameters]
    """Views of this vector; changes to one are visible in the other."""
    values: Tensor
    """``[V]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[V]``."""
    steps: Tensor
    """``[R]``; this and the following fields are as in `StackedParameters`."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """int64 ``[R]``."""
    row_lengths: Tensor
    """Number of values in each row, int64 ``[R]``."""

    @classmethod
    def from_blocks(cls, blocks: Sequence[StackedParameters]) -> FlatParameters:
        """Copies of all rows of ``blocks`` in one vector."""
        return cls._view_blocks(
            [(block.layout, len(block), block.buffers) for block in blocks],
            values=torch.cat([block.values.flatten() for block in blocks]),
            moments={
                name: torch.cat([block.moments[name].flatten() for block in blocks]) for name in blocks[0].moments
            },
            steps=torch.cat([block.steps for block in blocks]),
            learning_rates=torch.cat([block.learning_rates for block in blocks]),
            owners=torch.cat([block.owners for block in blocks]),
        )

    @classmethod
    def gather(
        cls, sources: Sequence[FlatParameters], blocks: Sequence[Sequence[Piece]], moment_names: Iterable[str]
    ) -> FlatParameters:
        """Copy rows of several vectors into one, with one block per sequence of pieces, which share a layout.

        A block that stays whole keeps its buffers.
        """
        # Where each row starts in the concatenated sources and in the new vector.
        source_blocks = [block for source in sources for block in source.blocks]
        sizes = np.array([len(block) for block in source_blocks])
        lengths: Ints = np.repeat([block.layout.size for block in source_blocks], sizes)
        first_block = np.cumsum([0, *(len(source.blocks) for source in sources)])
        first_row = sizes.cumsum() - sizes
        rows: Ints = np.concatenate(
            [first_row[first_block[piece.source] + piece.block] + piece.rows for pieces in blocks for piece in pieces]
        )
        new_lengths: Ints = lengths[rows]
        distance: Ints = (lengths.cumsum() - lengths)[rows] - (new_lengths.cumsum() - new_lengths)

        # Only one number per row is sent to the device, not one per value.
        device, count = sources[0].values.device, int(new_lengths.sum())
        packed = torch.from_numpy(np.stack([rows, new_lengths, distance])).to(device, non_blocking=True)
        row_index, row_lengths, row_distance = packed.unbind()
        place = row_distance.repeat_interleave(row_lengths, output_size=count).add_(torch.arange(count, device=device))

        def gather_by(index: Tensor, tensors: list[Tensor]) -> Tensor:
            return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).index_select(0, index)

        outlines: list[tuple[ParameterLayout, int, Mapping[str, Tensor]]] = []
        for block in blocks:
            parts = [sources[piece.source].blocks[piece.block] for piece in block]
            length, buffers = sum(len(piece.rows) for piece in block), parts[0].buffers
            if buffers and (len(block) > 1 or length < len(parts[0])):
                indices = [torch.from_numpy(piece.rows).to(device, non_blocking=True) for piece in block]
                buffers = {
                    name: torch.cat(
                        [part.buffers[name].index_select(0, index) for part, index in zip(parts, indices, strict=True)]
                    )
                    for name in buffers
                }
            outlines.append((parts[0].layout, length, buffers))
        return cls._view_blocks(
            outlines,
            values=gather_by(place, [source.values for source in sources]),
            moments={name: gather_by(place, [source.moments[name] for source in sources]) for name in moment_names},
            steps=gather_by(row_index, [source.steps for source in sources]),
            learning_rates=gather_by(row_index, [source.learning_rates for source in sources]),
            owners=torch.cat([source.owners for source in sources])[torch.from_numpy(rows)],
        )

    @classmethod
    def _view_blocks(
        cls,
        outlines: Sequence[tuple[ParameterLayout, int, Mapping[str, Tensor]]],
        *,
        values: Tensor,
        moments: Mapping[str, Tensor],
        steps: Tensor,
        learning_rates: Tensor,
        owners: Tensor,
    ) -> FlatParameters:
        """The vector with blocks of these layouts, numbers of rows and buffers, as views."""
        blocks: list[StackedParameters] = []
        value, row = 0, 0
        for layout, count, buffers in outlines:
            shape, span, rows = (count, layout.size), slice(value, value + count * layout.size), slice(row, row + count)
            part = {name: moment[span].view(shape) for name, moment in moments.items()}
            blocks.append(
                StackedParameters(
                    layout, values[span].view(shape), buffers, part, steps[rows], learning_rates[rows], owners[rows]
                )
            )
            value, row = span.stop, rows.stop
        # Only one number per row is sent to the device, not one per value.
        lengths = np.repeat([block.layout.size for block in blocks], [len(block) for block in blocks])
        row_lengths = torch.from_numpy(lengths).to(values.device, non_blocking=True)
        return cls(blocks, values, moments, steps, learning_rates, owners, row_lengths)

    @cached_property
    def row_of_value(self) -> Tensor:
        """The row of each value, int64 ``[V]``."""
        rows = torch.arange(len(self.owners), device=self.values.device)
        return rows.repeat_interleave(self.row_lengths, output_size=len(self.values))

    def split_rows(self, values: Tensor) -> list[Tensor]:
        """View a vector ``[V]`` as matrices ``[r, P]``: one for the first block, then one for each length of rows."""
        first, *others = self.blocks
        shapes = [(len(first), first.layout.size)]
        for size, blocks in itertools.groupby(others, lambda block: block.layout.size):
            shapes.append((sum(map(len, blocks)), size))
        parts: Sequence[Tensor] = torch.split_with_sizes(values, [rows * size for rows, size in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def expand_rows(self, by_row: Tensor) -> Tensor:
        """Repeat each row's number for all its values, ``[R]`` to ``[V]``."""
        return by_row.index_select(0, self.row_of_value)

    def sum_by_network(self, values: Tensor) -> Tensor:
        """Sum over each network's values, ``[V]`` to ``[E]``."""
        # Over each row and then over rows, always in the same order: that of ``index_add`` depends on a GPU's threads.
        by_row = torch.segment_reduce(values, "sum", lengths=self.row_lengths, unsafe=True)
        return torch.cat([by_row, by_row.new_zeros(1)])[self._rows_of_network].sum(1)

    @cached_property
    def _rows_of_network(self) -> Tensor:
        """Indices of each network's rows, int64 ``[E, K]``; filled up with R where a network has fewer than K rows."""
        owners = self.owners.numpy()
        counts = np.bincount(owners)
        order = np.argsort(owners, kind="stable")
        place = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        rows = np.full((len(counts), counts.max()), len(owners))
        rows[owners[order], place] = order
        return torch.from_numpy(rows).to(self.values.device, non_blocking=True)


class SeedKind(NamedTuple):
    """A slot and a blueprint: seeds of one kind have the same shapes and are computed in the same way."""

    slot: int
    """Index of the slot; the blueprint is an index, too."""
    blueprint: int
    blend: Blend = Blend.ADD


SeedModule: TypeAlias = Blueprint | BlendedBlueprint
"""The result of `esper.growth.slot.blend_blueprint`: a seed's parameters and computation."""


@dataclass(frozen=True)
class SeedBank:
    """All seeds of one kind in the population, computed in one grouped call; replaced when its seeds change."""

    template: SeedModule
    """A seed of this kind at the widest site."""
    call: Callable[..., Tensor]
    """Computes what seeds add, at full alpha, to features ``[r, N, ...]``. The arguments are parameters and buffers,
    each ``[r, *shape]``, the features, and the networks' inputs ``[r, N, ...]``."""
    block: StackedParameters
    """One row per seed."""

    @classmethod
    def empty(
        cls, template: SeedModule, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> SeedBank:
        """A bank without seeds."""
        template = template.to(device=device, dtype=dtype, non_blocking=True)
        block = StackedParameters.empty(template, moment_names, dtype, device)
        return cls(template, make_stacked_call(template), block)

    def __len__(self) -> int:
        return len(self.block)

    def head(self, count: int) -> SeedBank:
        """The bank's first ``count`` seeds, as views."""
        return self if count == len(self) else replace(self, block=self.block.head(count))

    def without(self, owners: Tensor) -> SeedBank:
        """The bank without the seeds of the networks in ``owners``, int64 ``[n]``."""
        return replace(self, block=self.block.without(owners))


@dataclass(frozen=True)
class PopulationParameters:
    """The hosts' rows, the banks of seeds, and the flat vector of which both are views; replaced as a whole."""

    host: StackedParameters
    """One row per network, in order."""
    banks: Mapping[SeedKind, SeedBank]
    """Banks of seeds by kind; none is empty, and banks with rows of equal length are adjacent."""
    flat: FlatParameters
    """All rows: first the hosts, then the banks."""

    @classmethod
    def build(cls, host: StackedParameters, banks: Mapping[SeedKind, SeedBank]) -> PopulationParameters:
        """Copy all rows into one flat vector; banks without seeds are dropped."""
        banks = {kind: banks[kind] for kind in _order_kinds(banks) if len(banks[kind])}
        flat = FlatParameters.from_blocks([host, *(bank.block for bank in banks.values())])
        host, *blocks = flat.blocks
        views = {kind: replace(bank, block=block) for (kind, bank), block in zip(banks.items(), blocks, strict=True)}
        return cls(host, views, flat)

    def exchange_seeds(
        self, gone: Mapping[SeedKind, Ints], newborn: Mapping[SeedKind, SeedBank]
    ) -> PopulationParameters:
        """Copy all rows without the seeds of ``gone``, networks ``[n]`` by kind, and with those in ``newborn``.

        Newborn seeds become the last rows of their banks.
        """
        if not gone and not newborn:
            return self
        pieces: dict[SeedKind, list[Piece]] = {}
        for number, (kind, bank) in enumerate(self.banks.items(), start=1):
            stay = ~np.isin(bank.block.owners.numpy(), gone[kind]) if kind in gone else np.ones(len(bank), np.bool_)
            if stay.any():
                pieces[kind] = [Piece(0, number, stay.nonzero()[0])]
        for number, (kind, bank) in enumerate(newborn.items()):
            pieces.setdefault(kind, []).append(Piece(1, number, np.arange(len(bank))))

        banks = {**newborn, **self.banks}
        order = _order_kinds({kind: banks[kind] for kind in pieces})
        sources = [self.flat]
        if newborn:
            sources.append(FlatParameters.from_blocks([bank.block for bank in newborn.values()]))
        host = Piece(0, 0, np.arange(len(self.host)))
        flat = FlatParameters.gather(sources, [[host], *(pieces[kind] for kind in order)], self.flat.moments)
        blocks = zip(order, flat.blocks[1:], strict=True)
        return PopulationParameters(
            flat.blocks[0], {kind: replace(banks[kind], block=block) for kind, block in blocks}, flat
        )


def _order_kinds(banks: Mapping[SeedKind, SeedBank]) -> list[SeedKind]:
    """Kinds in order, those with rows of equal length beside one another."""
    return sorted(banks, key=lambda kind: (banks[kind].block.layout.size, kind))
