"""All parameters of a population with their optimizer state: one flat vector, seen as stacks of rows.

`ParameterLayout` says how a module lies in a row, `StackedParameters` holds many modules of one architecture,
`SeedBank` the seeds of one kind, and `PopulationParameters` all of them, whose rows are views of one `FlatParameters`.
So a forward pass sees named tensors ``[R, *shape]``, and an optimizer step is a few operations on one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.blueprints.registry import Blueprint
from esper.growth.seed import BlendedBlueprint
from esper.lifecycle.actions import Blend
from esper.population.execution import make_stacked_call


@dataclass(frozen=True)
class ParameterLayout:
    """How the named parameters of one module lie in a flat row of P values."""

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
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
class StackedParameters:
    """R modules of one architecture, hosts or seeds: one row of parameters each, and all that belongs to it.

    Which rows there are never changes: `with_rows`, `reset_rows` and `without` make new stacks, so that whoever owns
    stacks commits a change by one assignment or not at all. Values and optimizer state are born and die in one call, so
    a row can never lack its state nor leave any behind. Only optimizers, and forward passes that keep running
    statistics, write into the tensors.
    """

    layout: ParameterLayout
    values: Tensor
    """``[R, P]``."""
    buffers: Mapping[str, Tensor]
    """The modules' buffers by name, each ``[R, *shape]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[R, P]``."""
    steps: Tensor
    """Optimizer steps each row has taken, ``[R]``, of the values' type."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """Network index of each row, int64 ``[R]``; on the CPU, like every index that decides what is computed."""

    @classmethod
    def empty(
        cls, module: nn.Module, moment_names: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> StackedParameters:
        """No rows yet, of the shapes of ``module``, which is of this type and on this device."""
        layout = ParameterLayout.from_module(module)
        flat = torch.zeros(0, layout.size, dtype=dtype, device=device)
        return cls(
            layout,
            flat,
            {name: buffer.new_zeros(0, *buffer.shape) for name, buffer in module.named_buffers()},
            {name: flat.clone() for name in moment_names},
            flat.new_zeros(0),
            flat.new_zeros(0),
            torch.zeros(0, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return self.values.shape[0]

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The values by parameter, each ``[R, *shape]``: views of ``values`` that are leaves and require grad.

        As leaves they cost a backward pass nothing; taken apart within the graph, they would cost it a tenth.
        """
        return {name: view.requires_grad_() for name, view in self.layout.unflatten(self.values).items()}

    def stack(self, modules: Sequence[nn.Module]) -> tuple[Tensor, dict[str, Tensor]]:
        """Values ``[r, P]`` and buffers ``[r, *shape]`` of modules of this architecture.

        Narrower ones are padded with zeros.

        Raises:
            ValueError: a module's parameters have other names, or exceed the shapes.
        """
        shapes = {name: buffer.shape[1:] for name, buffer in self.buffers.items()}
        return torch.stack([self.layout.flatten_module(module) for module in modules]), {
            name: torch.stack([pad(module.get_buffer(name), shape) for module in modules])
            for name, shape in shapes.items()
        }

    def with_rows(
        self, values: Tensor, buffers: Mapping[str, Tensor], learning_rates: Tensor, owners: Tensor
    ) -> StackedParameters:
        """These rows and ``r`` new ones ``[r, P]`` that have zero moments and no steps taken."""
        return self.join(self._make_untrained_rows(values, buffers, learning_rates, owners))

    def reset_rows(
        self, rows: Tensor, values: Tensor, buffers: Mapping[str, Tensor], learning_rates: Tensor
    ) -> StackedParameters:
        """The same with other parameters ``[r, P]`` and buffers at ``rows``, int64 ``[r]``, that were never trained."""
        index = rows.to(self.values.device, non_blocking=True)
        new = self._make_untrained_rows(values, buffers, learning_rates, self.owners[rows])
        return self._merge(lambda own, other: own.index_copy(0, index, other), new, self.owners)

    def join(self, other: StackedParameters) -> StackedParameters:
        """Stack these rows and then the other ones."""
        return self._merge(lambda own, new: torch.cat([own, new]), other, torch.cat([self.owners, other.owners]))

    def select(self, rows: Tensor) -> StackedParameters:
        """Copies of the rows at ``rows``, int64 ``[r]``."""
        index = rows.to(self.values.device, non_blocking=True)
        return self._merge(lambda own, _: own.index_select(0, index), self, self.owners[rows])

    def without(self, owners: Tensor) -> StackedParameters:
        """All but the rows of the networks in ``owners``, int64 ``[n]``."""
        return self.select(torch.isin(self.owners, owners, invert=True).nonzero().squeeze(1))

    def _make_untrained(
        self, values: Tensor, buffers: Mapping[str, Tensor], learning_rates: Tensor, owners: Tensor
    ) -> StackedParameters:
        """Rows of this architecture, type and device, with zero moments and no steps taken."""
        count = values.shape[0]
        if values.shape != (count, self.layout.size) or learning_rates.shape != (count,) or owners.shape != (count,):
            raise ValueError(
                f"rows {tuple(values.shape)}, learning rates {tuple(learning_rates.shape)} and owners "
                f"{tuple(owners.shape)} must be [r, {self.layout.size}], [r] and [r]"
            )
        zeros = self.values.new_zeros(count, self.layout.size)
        return StackedParameters(
            self.layout,
            values.to(zeros, non_blocking=True),
            {name: buffers[name].to(own, non_blocking=True) for name, own in self.buffers.items()},
            dict.fromkeys(self.moments, zeros),
            zeros.new_zeros(count),
            learning_rates.to(zeros, non_blocking=True),
            owners,
        )

    def _merge(
        self, merge: Callable[[Tensor, Tensor], Tensor], other: StackedParameters, owners: Tensor
    ) -> StackedParameters:
        """What ``merge`` makes of each of these tensors and the other's, and these ``owners``."""
        return StackedParameters(
            self.layout,
            merge(self.values, other.values),
            {name: merge(own, other.buffers[name]) for name, own in self.buffers.items()},
            {name: merge(own, other.moments[name]) for name, own in self.moments.items()},
            merge(self.steps, other.steps),
            merge(self.learning_rates, other.learning_rates),
            owners,
        )


@dataclass(frozen=True)
class FlatParameters:
    """The rows of several stacks in one flat vector: R rows, V values in all, in the order of ``blocks``."""

    blocks: Sequence[StackedParameters]
    """Views of this vector: what changes here changes there."""
    values: Tensor
    """``[V]``."""
    moments: Mapping[str, Tensor]
    """Optimizer state by name, each ``[V]``."""
    steps: Tensor
    """``[R]``, as the other fields of `StackedParameters`."""
    learning_rates: Tensor
    """``[R]``."""
    owners: Tensor
    """int64 ``[R]``."""
    row_of_value: Tensor
    """The row of each value, int64 ``[V]``."""

    @classmethod
    def of(cls, blocks: Sequence[StackedParameters]) -> FlatParameters:
        """A vector of copies of ``blocks``."""
        values = concatenate_flat([block.values for block in blocks])
        moments = {name: concatenate_flat([block.moments[name] for block in blocks]) for name in blocks[0].moments}
        steps = torch.cat([block.steps for block in blocks])
        learning_rates = torch.cat([block.learning_rates for block in blocks])
        owners = torch.cat([block.owners for block in blocks])
        widths = torch.cat([block.owners.new_full((len(block),), block.layout.size) for block in blocks])
        row_of_value = torch.arange(len(owners)).repeat_interleave(widths).to(values.device, non_blocking=True)
        views = _view_rows(blocks, values, moments, steps)
        return cls(views, values, moments, steps, learning_rates, owners, row_of_value)

    def spread(self, by_row: Tensor) -> Tensor:
        """``[R]`` to ``[V]``: each row's number for each of its values."""
        return by_row.index_select(0, self.row_of_value)


def concatenate_flat(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor ``[R, P]`` per block as a vector ``[V]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _view_rows(
    blocks: Sequence[StackedParameters], values: Tensor, moments: Mapping[str, Tensor], steps: Tensor
) -> list[StackedParameters]:
    views: list[StackedParameters] = []
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


SeedModule: TypeAlias = Blueprint | BlendedBlueprint
"""What `esper.growth.seed.blend_blueprint` makes: a seed's parameters, and what they change."""


@dataclass(frozen=True)
class SeedBank:
    """All seeds of one kind across the population, computed as one grouped call.

    Like its rows it is replaced, never changed, when seeds come or go.
    """

    template: SeedModule
    """A seed of this kind at the widest site."""
    call: Callable[..., Tensor]
    """What seeds add, at full weight, to their networks' features ``[r, N, ...]``, from their parameters and buffers,
    each ``[r, *shape]``, these features, and their networks' inputs ``[r, N, ...]``."""
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

    def with_seeds(self, seeds: Sequence[SeedModule], learning_rates: Tensor, owners: Tensor) -> SeedBank:
        """This bank and new seeds, int64 ``owners [r]`` and ``learning_rates [r]``."""
        return replace(self, block=self.block.with_rows(*self.block.stack(seeds), learning_rates, owners))

    def without(self, owners: Tensor) -> SeedBank:
        """This bank less the seeds of the networks in ``owners``, int64 ``[n]``."""
        return replace(self, block=self.block.without(owners))


@dataclass(frozen=True)
class PopulationParameters:
    """The hosts' rows, the banks of seeds, and the flat vector that both are views of.

    They are replaced, never changed, when rows come or go. So a population owns all its rows by one reference, which it
    exchanges when a change has succeeded as a whole.
    """

    host: StackedParameters
    """One row per network, in order."""
    banks: Mapping[SeedKind, SeedBank]
    """Banks of seeds by kind; none of them is empty."""
    flat: FlatParameters
    """All rows: the hosts', then the banks'."""

    @classmethod
    def build(cls, host: StackedParameters, banks: Mapping[SeedKind, SeedBank]) -> PopulationParameters:
        """Copies of all rows, moved into one flat vector; banks without seeds are dropped."""
        kept = {kind: bank for kind, bank in banks.items() if len(bank)}
        flat = FlatParameters.from_blocks([host, *(bank.block for bank in kept.values())])
        host, *blocks = flat.blocks
        views = {kind: replace(bank, block=own) for (kind, bank), own in zip(kept.items(), blocks, strict=True)}
        return cls(host, views, flat)
