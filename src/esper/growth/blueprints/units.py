"""More hidden units between two layers of a host; they become part of these layers when the model is finalized."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from esper.errors import ExportError
from esper.growth.blueprints.registry import Blueprint, Context, Family, Folded, register, register_sizes
from esper.growth.depth import copy_block
from esper.growth.site import Hidden, Layout, Site, Step
from esper.growth.widening import (
    add_channels,
    add_inputs,
    add_outputs,
    find_channel_axis,
    get_weight_shape,
    is_plain_norm,
    is_widenable,
    make_with_channels,
    make_with_inputs,
    make_with_outputs,
)

_SHARE = 8
"""``units`` adds one unit for this many existing ones."""


@register
class Units(Blueprint):
    """``s = W2' f(W1' x + b1')``: more units between two layers ``W2 f(W1 x + b1) + b2``; ``W2' = 0`` at birth.

    ``x`` is the input of the first layer, and ``f`` is whatever the host computes between the two, such as an
    activation, dropout, or batch normalisation (with channels of its own). In a gated MLP, ``f(G' x) * (U' x)`` takes
    the place of ``f(W1' x + b1')``. The layers are linear, or convolutions with the same options as the host's. When
    the model is finalized, ``W1'`` and ``b1'`` become additional outputs of the first layer, and ``W2'`` additional
    inputs of the second.

    Widening as in Net2Net (Chen et al. 2015, arXiv 1511.05641), with new units that contribute nothing at birth as in
    GradMax (Evci et al. 2022, arXiv 2201.05125), faded in by alpha. ``units_K`` adds K units; ``units`` adds an eighth
    of the existing number, at least 1.

    Unlike other blueprints, it has dropout and running statistics if the host has them at this place.
    """

    name: ClassVar[str] = "units"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False  # no more than the host itself does
    context: ClassVar[Context] = Context.HIDDEN
    size: ClassVar[int | None] = None
    """Number of units; None: a fraction of the existing number."""

    kept: Tensor

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        hidden, units = _require_hidden(site), self.count_units(site)
        self.layers = nn.ModuleList(make_with_outputs(layer, units, generator) for layer in hidden.layers)
        self.steps = nn.ModuleList(_make_steps(steps, units, generator) for steps in hidden.steps)
        self.after = _make_steps(hidden.after, units, generator)
        self.last = make_with_inputs(hidden.reader, units, generator)
        # Which units are kept: all of them, until some are pruned.
        self.register_buffer("kept", torch.ones(units, dtype=torch.bool, device=generator.device))
        self._channel_axis = find_channel_axis(hidden.reader)
        self._names = hidden.names
        chains = [*zip(self.steps, hidden.steps, strict=True), (self.after, hidden.after)]
        self._norms = [
            (step.name, number, place)
            for number, (_, steps) in enumerate(chains)
            for place, step in enumerate(steps)
            if is_plain_norm(step.module)
        ]
        """For each normalisation its name in the host, the index of its chain (the last is ``after``), its index there.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        # Classes of a given size are created on demand, so pickle cannot import them.
        return make_empty, (self.size,), self.__getstate__()

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        factors = [steps(layer(inputs)) for layer, steps in zip(self.layers, self.steps, strict=True)]
        hidden: Tensor = self.after(math.prod(factors[1:], start=factors[0]))
        kept = self.kept if self._channel_axis == -1 else self.kept.view(-1, *[1] * (hidden.dim() - 2))
        contribution: Tensor = self.last(hidden * kept)
        return contribution

    def rank_units(self) -> list[int]:
        """Indices of the kept units, sorted by the product of the norms of their weights, smallest first."""
        outgoing = self.last.get_parameter("weight").detach().transpose(0, 1)
        incoming = [layer.get_parameter("weight").detach() for layer in self.layers]
        squares = [weight.flatten(1).square().sum(dim=1) for weight in (outgoing, *incoming)]
        kept = self.kept.nonzero().flatten()
        order = math.prod(squares[1:], start=squares[0])[kept].argsort()
        return cast("list[int]", kept[order].tolist())

    @torch.no_grad()
    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Add the units to the layers of the host.

        Raises:
            ExportError: a weight is no longer a parameter.
        """
        layers, last = [host.get_submodule(path) for path in self._names], host.get_submodule(name)
        for path, layer in zip((*self._names, name), (*layers, last), strict=True):
            if not is_widenable(layer):
                raise ExportError(
                    f"the weight of {path!r} is now computed from other tensors, as by a weight norm or pruning added "
                    f"after {self.name!r} grew there, so no units can be added to it: remove that before finalize()"
                )
        kept = self.kept.nonzero().flatten()
        for layer, added in zip(layers, self.layers, strict=True):
            add_outputs(layer, added, kept)
        chains = [*self.steps, self.after]
        for path, number, place in self._norms:
            add_channels(host.get_submodule(path), cast("nn.Sequential", chains[number])[place], kept)
        add_inputs(last, self.last, kept, weight)
        return Folded.WIDENED

    @classmethod
    def count_units(cls, site: Site) -> int:
        """Number of units at ``site``."""
        return cls.size or max(_require_hidden(site).width // _SHARE, 1)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        hidden = _require_hidden(site)
        # One unit has a column of the last layer, a row and a bias of each other layer, and a channel of each norm.
        outputs, _, *kernel = get_weight_shape(hidden.reader)
        one = math.prod((outputs, *kernel))
        for layer in hidden.layers:
            one += math.prod(get_weight_shape(layer)[1:]) + ("bias" in dict(layer.named_parameters(recurse=False)))
        for step in (*(step for steps in hidden.steps for step in steps), *hidden.after):
            one += len(list(step.module.parameters()))
        return cls.count_units(site) * one

    @classmethod
    def flops_at(cls, site: Site) -> int:
        hidden = _require_hidden(site)
        # One unit costs a column of the last layer at each output position, and a row of each other layer.
        _, _, *kernel = get_weight_shape(hidden.reader)
        one = math.prod((*site.shape, *kernel))
        one += sum(hidden.positions * math.prod(get_weight_shape(layer)[1:]) for layer in hidden.layers)
        return 2 * cls.count_units(site) * one

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and site.hidden is not None


def _make_steps(steps: Iterable[Step], units: int, generator: torch.Generator) -> nn.Sequential:
    """Copies of the steps for ``units`` units: batch normalisation gets new channels, other modules stay the same."""
    return nn.Sequential(
        *(
            make_with_channels(step.module, units, generator) if is_plain_norm(step.module) else copy_block(step.module)
            for step in steps
        )
    )


def _require_hidden(site: Site) -> Hidden:
    assert site.hidden is not None, "call supports(site) first"
    return site.hidden


@cache
def make_size(size: int) -> type[Units]:
    """The blueprint ``units_K`` for a number of units."""
    members = {"__module__": __name__, "__doc__": f"{size} more hidden units.", "name": f"units_{size}", "size": size}
    return type(f"Units{size}", (Units,), members)


def make_empty(size: int | None) -> Units:
    """An instance without any state, for copying and unpickling."""
    kind = Units if size is None else make_size(size)
    return kind.__new__(kind)


register_sizes(Units.name, make_size)
