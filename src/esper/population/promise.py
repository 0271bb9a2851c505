"""What every blueprint promises in the slots of a population's networks, from one more pass.

`esper.growth.promise` has the formula. All networks, slots and blueprints are measured together: one forward and
backward pass gives features and functional gradients at all slots, and then each blueprint at each slot is
differentiated example by example for all networks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.engine.backend import Promises
from esper.growth.blueprints.registry import Blueprint, Context
from esper.growth.promise import (
    GradientBatch,
    compute_promise_from_gradients,
    find_parameters_with_gradient,
    inner_product_with_output,
)
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.deferred import Deferred
from esper.numerics.random_streams import module_generator
from esper.population.execution import Parameters, SlotOp
from esper.population.forward import build_program, prepare_slot_op, select_blended
from esper.population.learning import Batch
from esper.population.parameters import StackedParameters
from esper.population.population import Population

_SEED, _DRAW = 0, 0
"""Of the initial values of newborns; all networks of one width share them."""


@dataclass(frozen=True)
class _Newborns:
    """A blueprint at a slot, newborn, for every width that a network has there."""

    template: Blueprint
    names: tuple[str, ...]
    """Names of the parameters that a gradient reaches."""
    widths: tuple[int, ...]
    parameters: Parameters
    """``[W, *shape]``, as wide as the widest."""
    buffers: Parameters


class PromiseMeter:
    """Measures what blueprints promise.

    Args:
        population: Whose networks.
    """

    def __init__(self, population: Population) -> None:
        self._population = population
        self._newborns: dict[tuple[int, int], _Newborns] = {}

    def measure(self, batch: Batch, due: Bools) -> Deferred[Promises]:
        """What is promised in the slots ``due``, bool ``[E, S]``, by examples ``[E, N, ...]``."""
        population = self._population
        shape = (population.size, population.table.slots, len(population.config.blueprints))
        due = due[:, :, None] & population.specs.compatible
        if not due.any():
            nothing = np.full(shape, np.nan)
            return Deferred((), lambda: Promises(nothing, nothing, np.zeros(shape[0], np.bool_)))
        population.execution.train(False)
        asked = _ask(population, batch)
        scores: list[Tensor] = []
        places: list[_Place] = []
        for slot in range(shape[1]):
            for blueprint in range(shape[2]):
                rows = due[:, slot, blueprint].nonzero()[0]
                if len(rows):
                    scores.append(self._measure(slot, blueprint, rows, *asked[slot], batch.inputs))
                    places.append(_Place(slot, blueprint, rows))
        return Deferred((torch.cat(scores, 1),), partial(_scatter_to_slots, shape, places))

    def _measure(self, slot: int, blueprint: int, rows: Ints, *asked: Tensor) -> Tensor:
        """Fitted and held-out promise ``[2, r]`` to the networks ``rows``, no more at a time than in other passes."""
        at_once = self._population.config.networks_per_pass or len(rows)
        parts: list[Tensor] = []
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            there = torch.from_numpy(some).to(asked[0].device)
            promised = compute_promise_from_gradients(
                self._differentiate(slot, blueprint, some, *(one[there] for one in asked))
            )
            parts.append(torch.stack([promised.fitted, promised.held_out.mean(-1)]))
        return torch.cat(parts, 1)

    def _differentiate(
        self, slot: int, blueprint: int, networks: Ints, features: Tensor, wishes: Tensor, inputs: Tensor
    ) -> Tensor:
        """The gradients of all examples of some networks, G ``[r, N, P]``."""
        newborns = self._of(slot, blueprint)
        place = {width: index for index, width in enumerate(newborns.widths)}
        widths = self._population.specs.widths[networks, slot].tolist()
        chosen = torch.tensor([place[width] for width in widths]).to(features.device)
        own = {name: stacked[chosen] for name, stacked in newborns.parameters.items()}
        fixed = {name: own[name] for name in own if name not in newborns.names}
        fixed |= {name: stacked[chosen] for name, stacked in newborns.buffers.items()}
        moving = {name: own[name] for name in newborns.names}
        seen = inputs if newborns.template.context is Context.NETWORK else features
        # vmap would go through fused attention example by example.
        with sdpa_kernel(SDPBackend.MATH):
            gradients = vmap(vmap(grad(partial(inner_product_with_output, newborns.template)), (None, None, 0, 0)))(
                moving, fixed, (features, seen), wishes
            )
        return torch.cat([gradient.flatten(2) for gradient in gradients.values()], 2)

    def _of(self, slot: int, blueprint: int) -> _Newborns:
        """For the widths that networks have now."""
        widths = tuple(sorted(set(self._population.specs.widths[:, slot].tolist())))
        key = (slot, blueprint)
        if key not in self._newborns or not set(widths) <= set(self._newborns[key].widths):
            known = self._newborns[key].widths if key in self._newborns else ()
            self._newborns[key] = self._make(slot, blueprint, tuple(sorted({*known, *widths})))
        return self._newborns[key]

    def _make(self, slot: int, blueprint: int, widths: tuple[int, ...]) -> _Newborns:
        config = self._population.config
        site, kind = self._population.execution.sites[slot], self._population.specs.kinds[blueprint]

        def newborn(width: int) -> Blueprint:
            return kind(site.with_width(width), module_generator(_SEED, slot, _DRAW)).to(config.device, config.dtype)

        template = newborn(site.width)
        stack = StackedParameters.empty(template, (), config.dtype, config.device)
        values, buffers = stack.stack([newborn(width) for width in widths])
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(8, *shape, generator=generator).to(config.device, config.dtype)
            for shape in (site.shape, site.input_shape)
        ]
        reached = find_parameters_with_gradient(template, [GradientBatch(tuple(drawn), torch.ones_like(drawn[0]))])
        return _Newborns(template, tuple(reached), widths, stack.layout.unflatten(values), buffers)


@dataclass
class _AskOp:
    """What a slot does, and a note of what passes there."""

    usual: SlotOp | None
    features: list[Tensor] = field(default_factory=list[Tensor])
    leaves: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        passed = features if self.usual is None else self.usual(features, inputs)
        leaf = torch.zeros_like(passed, requires_grad=True)
        self.features.append(passed.detach())
        self.leaves.append(leaf)
        return passed + leaf


def _ask(population: Population, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Features and functional gradients ``[E, N, ...]`` of all slots."""
    usual = prepare_slot_op(population, select_blended(population))
    ops: list[list[_AskOp]] = [[] for _ in range(population.table.slots)]

    def noted(slot: int, networks: range) -> SlotOp:
        ops[slot].append(_AskOp(usual(slot, networks)))
        return ops[slot][-1]

    with torch.enable_grad():
        frozen = {name: stacked.detach() for name, stacked in population.host.parameters.items()}
        logits = build_program(population, noted, aside=True)(batch.inputs, frozen)
        total = F.cross_entropy(logits.mT, batch.labels, reduction="sum")
        leaves = [leaf for own in ops for op in own for leaf in op.leaves]
        wishes = iter(torch.autograd.grad(total, leaves, materialize_grads=True))
    return [
        (
            torch.cat([features for op in own for features in op.features]),
            torch.cat([next(wishes) for op in own for _ in op.leaves]),
        )
        for own in ops
    ]


class _Place(NamedTuple):
    """Which figures come next."""

    slot: int
    blueprint: int
    rows: Ints
    """The networks, ``[r]``."""


def _scatter_to_slots(shape: tuple[int, int, int], places: Sequence[_Place], values: Floats) -> Promises:
    """Scatter ``[2, sum of r]`` values, in the order of the places, to networks, slots and blueprints."""
    both = np.full((2, *shape), np.nan)
    start = 0
    for slot, blueprint, rows in places:
        both[:, rows, slot, blueprint] = values[:, start : start + len(rows)]
        start += len(rows)
    return Promises(both[0], both[1], np.zeros(shape[0], np.bool_))
