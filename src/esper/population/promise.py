"""Promises of all blueprints in the slots of a population's networks, from one additional pass.

`esper.growth.promise` has the formula. All networks, slots and blueprints are measured together. One forward and
backward pass gives features and functional gradients at all slots. Then each blueprint at each slot is differentiated
example by example, for all networks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.engine.backend import Promises
from esper.growth.blueprints.registry import Blueprint, Context
from esper.growth.promise import (
    GradientBatch,
    compute_promise_from_gradients,
    differentiate_output,
    find_parameters_with_gradient,
)
from esper.growth.site import Site
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.deferred import Deferred
from esper.numerics.random_streams import module_generator
from esper.population.execution import Parameters, SlotOp
from esper.population.forward import build_program, prepare_slot_op, select_blended
from esper.population.learning import Batch
from esper.population.parameters import StackedParameters
from esper.population.population import Population

_SEED, _DRAW = 0, 0
"""Random seed and draw of the initial values of newborns, which all networks of equal widths share."""


@dataclass(frozen=True)
class _Newborns:
    """Newly initialised modules of a blueprint at a slot, one for each of the W sites of networks there."""

    template: Blueprint
    count: int
    """W."""
    reached: Parameters
    """The parameters that get a gradient, ``[W, *shape]``, padded to the widest site."""
    fixed: Parameters
    """All other parameters and the buffers, in the same form."""


class PromiseMeter:
    """Measures the promises of blueprints for the networks of ``population``."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._newborns: dict[tuple[int, int], _Newborns] = {}
        self._sites: dict[int, dict[tuple[int, ...], Site]] = {}
        """For each slot, all current and past sites of networks there, by their `Site.sizes`."""

    def measure(self, batch: Batch, due: Bools) -> Deferred[Promises]:
        """Measure the promises in the slots ``due``, bool ``[E, S]``, on examples ``[E, N, ...]``."""
        population = self._population
        shape = (population.size, population.table.slots, len(population.config.blueprints))
        due = due[:, :, None] & population.specs.compatible
        if not due.any():
            empty = np.full(shape, np.nan)
            return Deferred((), lambda: Promises(empty, empty, np.zeros(shape[0], np.bool_)))

        # One pass for the features and functional gradients of all slots, then each blueprint at each slot.
        population.execution.train(False)
        recorded = _record_functional_gradients(population, batch)
        scores: list[Tensor] = []
        places: list[tuple[int, int, Ints]] = []
        for slot, record in enumerate(recorded):
            sites = self._find_sites(slot)
            for blueprints, networks in self._group_networks(due[:, slot]):
                # Gathered once for all blueprints, with the index of each network's site.
                index = np.zeros((2, len(networks)), np.int64)
                index[:] = networks, sites[networks]
                rows, sites_of_rows = torch.from_numpy(index).to(record.features.device, non_blocking=True)
                h, g = record.features[rows], record.gradients[rows]
                # Blueprints without a context get the features in its place.
                contexts = {Context.NOTHING: h}
                for blueprint in blueprints:
                    context = population.specs.kinds[blueprint].context
                    if context not in contexts:
                        source = batch.inputs if context is Context.NETWORK else record.source
                        assert source is not None, "such blueprints are offered only where there are hidden units"
                        contexts[context] = source[rows]
                    newborns = self._get_newborns(slot, blueprint)
                    scores.append(self._score(newborns, sites_of_rows, h, g, contexts[context]))
                    places.append((slot, blueprint, networks))
        return Deferred((torch.cat(scores, 1),), partial(_scatter_to_slots, shape, places))

    def _group_networks(self, due: Bools) -> Iterator[tuple[list[int], Ints]]:
        """Group networks with the same ``due`` blueprints, bool ``[E, K]``, at most as many as fit in one pass."""
        patterns, pattern_of_network = np.unique(due, axis=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            networks, blueprints = (
                np.flatnonzero(pattern_of_network.ravel() == number),
                np.flatnonzero(pattern).tolist(),
            )
            limit = self._population.config.networks_per_pass or len(networks)
            for start in range(0, len(networks) if blueprints else 0, limit):
                yield blueprints, networks[start : start + limit]

    def _score(
        self, newborns: _Newborns, sites_of_rows: Tensor, features: Tensor, gradients: Tensor, context: Tensor
    ) -> Tensor:
        """Fitted and held-out promise ``[2, r]``, from tensors ``[r, N, ...]`` and indices of sites, int64 ``[r]``."""
        reached = {name: stacked[sites_of_rows] for name, stacked in newborns.reached.items()}
        fixed = {name: stacked[sites_of_rows] for name, stacked in newborns.fixed.items()}
        # The gradients of all examples, G [r, N, P]. vmap would run fused attention example by example.
        differentiate = vmap(vmap(partial(differentiate_output, newborns.template), (None, None, 0, 0)))
        with sdpa_kernel(SDPBackend.MATH):
            by_parameter = differentiate(reached, fixed, (features, context), gradients)
        parts = [part.flatten(2) for part in by_parameter.values()]
        promise = compute_promise_from_gradients(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
        return torch.stack([promise.fitted, promise.held_out.mean(-1)])

    def _find_sites(self, slot: int) -> Ints:
        """Index of each network's site, int64 ``[E]``, among all current and past sites at the slot."""
        specs, known = self._population.specs, self._sites.setdefault(slot, {})
        for sizes, site in specs.sites_by_sizes[slot].items():
            known.setdefault(sizes, site)
        order = {sizes: place for place, sizes in enumerate(known)}
        return np.array([order[sizes] for sizes in specs.sites_by_sizes[slot]])[specs.site_places[:, slot]]

    def _get_newborns(self, slot: int, blueprint: int) -> _Newborns:
        """The newborns for all current and past sites at the slot."""
        newborns, sites = self._newborns.get((slot, blueprint)), list(self._sites[slot].values())
        if newborns is None or newborns.count != len(sites):
            newborns = self._create_newborns(slot, blueprint, sites)
            self._newborns[slot, blueprint] = newborns
        return newborns

    def _create_newborns(self, slot: int, blueprint: int, sites: Sequence[Site]) -> _Newborns:
        # Created and tried on the CPU, so that the device gets all values in one copy.
        config = self._population.config
        widest, kind = self._population.execution.sites[slot], self._population.specs.kinds[blueprint]

        def create_newborn(site: Site) -> Blueprint:
            return kind(site, module_generator(_SEED, slot, _DRAW)).to(config.dtype)

        # Stacked as a population's seeds are, at full width; on the CPU, so that nothing waits for the device.
        template = create_newborn(widest)
        stack = StackedParameters.empty(template, (), config.dtype, torch.device("cpu"))
        values, buffers = stack.stack_modules([create_newborn(site) for site in sites])

        # Outputs start at zero, so many parameters have zero gradients for every example: random examples show which.
        generator = torch.Generator().manual_seed(0)
        context_shape = widest.input_shape
        if kind.context is Context.HIDDEN and widest.hidden is not None:
            context_shape = widest.hidden.input_shape
        examples = [
            torch.randn(8, *shape, generator=generator).to(config.dtype) for shape in (widest.shape, context_shape)
        ]
        reached = find_parameters_with_gradient(
            template, [GradientBatch(tuple(examples), torch.ones_like(examples[0]))]
        )

        # Only the stacks are copied to the device, because only the structure of the template is used.
        parameters = stack.layout.unflatten(values.to(config.device, non_blocking=True))
        buffers = {name: buffer.to(config.device, non_blocking=True) for name, buffer in buffers.items()}
        fixed = {name: stacked for name, stacked in parameters.items() if name not in reached}
        reached_parameters = {name: parameters[name] for name in reached}
        return _Newborns(template, len(sites), reached_parameters, {**fixed, **buffers})


class _Record(NamedTuple):
    """The tensors recorded at a slot."""

    features: Tensor
    """``[E, N, ...]``."""
    source: Tensor | None
    """Input of the layer that computes the hidden units before the slot, ``[E, N, ...]``; None without such a layer."""
    gradients: Tensor
    """The loss's gradients with respect to the features, ``[E, N, ...]``."""


def _record_functional_gradients(population: Population, batch: Batch) -> list[_Record]:
    """Record features, sources and functional gradients at all slots."""
    most = population.config.examples_per_pass or batch.labels.shape[1]
    if batch.labels.shape[1] > most:
        parts = [
            _record_functional_gradients(population, Batch(*part))
            for part in zip(torch.split(batch.inputs, most, 1), torch.split(batch.labels, most, 1), strict=True)
        ]
        return [_join_records(records, dim=1) for records in zip(*parts, strict=True)]
    make_blend_op = prepare_slot_op(population, select_blended(population))
    recorded: list[list[Tensor]] = [[] for _ in range(population.table.slots)]
    sources: list[list[Tensor | None]] = [[] for _ in range(population.table.slots)]
    leaves: list[list[Tensor]] = [[] for _ in range(population.table.slots)]

    def make_recording_op(slot: int, networks: range) -> SlotOp:
        blend = make_blend_op(slot, networks)

        def record(features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
            outputs = features if blend is None else blend(features, inputs, source)
            # A zero added to the features has the same gradient as the features.
            leaf = torch.zeros_like(outputs, requires_grad=True)
            recorded[slot].append(outputs.detach())
            sources[slot].append(None if source is None else source.detach())
            leaves[slot].append(leaf)
            return outputs + leaf

        return record

    with torch.enable_grad():
        host = {name: stacked.detach() for name, stacked in population.host.parameters.items()}
        logits = build_program(population, make_recording_op, keep_buffers=True)(batch.inputs, host)
        # Losses are summed over examples and averaged over the positions of each.
        positions = batch.labels[0, 0].numel()
        # Summed separately, because on a GPU the loss function would sum in any order.
        losses = F.cross_entropy(logits.flatten(1, -2).mT, batch.labels.flatten(1), reduction="none")
        total = losses.sum() / positions
        gradients = iter(torch.autograd.grad(total, [leaf for part in leaves for leaf in part], materialize_grads=True))
    # Join the tensors of the passes over networks, in the dtype of the newborns' parameters.
    dtype = population.config.dtype
    return [
        _join_records(
            [
                _Record(features.to(dtype), None if source is None else source.to(dtype), next(gradients).to(dtype))
                for features, source in zip(*by_pass, strict=True)
            ],
            dim=0,
        )
        for by_pass in zip(recorded, sources, strict=True)
    ]


def _join_records(records: Sequence[_Record], dim: int) -> _Record:
    """Join records of different networks or examples along the axis ``dim``."""
    sources = [record.source for record in records if record.source is not None]
    return _Record(
        torch.cat([record.features for record in records], dim),
        torch.cat(sources, dim) if sources else None,
        torch.cat([record.gradients for record in records], dim),
    )


def _scatter_to_slots(shape: tuple[int, int, int], places: Sequence[tuple[int, int, Ints]], values: Floats) -> Promises:
    """Scatter values ``[2, sum of r]``, in the order of the places, to networks, slots and blueprints."""
    fitted, held_out = np.full((2, *shape), np.nan)
    start = 0
    for slot, blueprint, networks in places:
        stop = start + len(networks)
        fitted[networks, slot, blueprint], held_out[networks, slot, blueprint] = values[:, start:stop]
        start = stop
    return Promises(fitted, held_out, np.zeros(shape[0], np.bool_))
