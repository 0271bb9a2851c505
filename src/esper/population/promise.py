"""Promises of all blueprints in the slots of a population's networks; `esper.growth.promise` has the formula.

One forward and backward pass gives features and functional gradients at all slots. Then each blueprint at each slot is
differentiated example by example, for all networks at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.growth.blueprints.registry import Blueprint, Context
from esper.growth.promise import (
    GradientBatch,
    Promises,
    compute_promise_from_gradients,
    differentiate_output,
    find_parameters_with_gradient,
)
from esper.growth.site import Site
from esper.numerics.arrays import Bools, Ints
from esper.numerics.devices import to_arrays
from esper.numerics.random_streams import module_generator
from esper.population.execution import Parameters, SlotOp
from esper.population.forward import build_passes, prepare_slot_op, run_passes, select_blended
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

    def measure(self, batch: Batch, due: Bools) -> Promises:
        """Measure the promises in the slots ``due``, bool ``[E, S]``, on examples ``[E, N, ...]``."""
        population = self._population
        shape = (population.size, population.table.slots, len(population.config.blueprints))
        fitted, held_out = np.full((2, *shape), np.nan)
        promises = Promises(fitted, held_out, np.zeros(shape[0], np.bool_))
        due = due[:, :, None] & population.specs.compatible
        if not due.any():
            return promises

        population.execution.train(False)
        scores: list[Tensor] = []
        places: list[tuple[Ints, int, int]] = []
        for slot, recorded in enumerate(_record_calls(population, batch)):
            sites = self._find_sites(slot)
            for blueprints, networks in self._group_networks(due[:, slot]):
                # Gathered once for all blueprints, with the index of each network's site.
                index = torch.from_numpy(np.stack([networks, sites[networks]]))
                rows, sites_of_rows = index.to(recorded.gradients.device, non_blocking=True)
                h, g = recorded.inputs[0][rows], recorded.gradients[rows]
                # Blueprints without a context get the features in its place.
                contexts = {Context.NOTHING: h}
                for blueprint in blueprints:
                    context = population.specs.kinds[blueprint].context
                    if context not in contexts:
                        contexts[context] = recorded.contexts[context][rows]
                    newborns = self._get_newborns(slot, blueprint)
                    reached = {name: stacked[sites_of_rows] for name, stacked in newborns.reached.items()}
                    fixed = {name: stacked[sites_of_rows] for name, stacked in newborns.fixed.items()}
                    # All examples' gradients, G [r, N, P]. vmap would run fused attention example by example.
                    differentiate = vmap(vmap(partial(differentiate_output, newborns.template), (None, None, 0, 0)))
                    with sdpa_kernel(SDPBackend.MATH):
                        by_parameter = differentiate(reached, fixed, (h, contexts[context]), g)
                    parts = [part.flatten(2) for part in by_parameter.values()]
                    promise = compute_promise_from_gradients(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
                    scores.append(torch.stack([promise.fitted, promise.held_out.mean(-1)]))
                    places.append((networks, slot, blueprint))

        # The CPU waits for the device once.
        (values,) = to_arrays(torch.cat(scores, 1))
        ends = np.cumsum([len(networks) for networks, _, _ in places])
        for place, (by_fit, by_half) in zip(places, np.split(values, ends[:-1], axis=1), strict=True):
            fitted[place], held_out[place] = by_fit, by_half
        return promises

    def _group_networks(self, due: Bools) -> Iterator[tuple[list[int], Ints]]:
        """Group networks with the same ``due`` blueprints, bool ``[E, K]``, at most as many as fit in one pass."""
        patterns, pattern_of_network = np.unique(due, axis=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            networks = np.flatnonzero(pattern_of_network.ravel() == number)
            blueprints: list[int] = np.flatnonzero(pattern).tolist()
            limit = self._population.config.networks_per_pass or len(networks)
            for start in range(0, len(networks) if blueprints else 0, limit):
                yield blueprints, networks[start : start + limit]

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
        if newborns is not None and newborns.count == len(sites):
            return newborns
        # Stacked as a population's seeds are, at full width; on the CPU, so that the device gets all values in one copy
        # and nothing waits for it.
        config = self._population.config
        widest, kind = self._population.execution.sites[slot], self._population.specs.kinds[blueprint]
        template, *modules = (
            kind(site, module_generator(_SEED, slot, _DRAW)).to(config.dtype) for site in (widest, *sites)
        )
        stack = StackedParameters.empty(template, (), config.dtype, torch.device("cpu"))
        values, buffers = stack.stack_modules(modules)

        # Outputs start at zero, so many parameters have zero gradients for every example: random examples show which.
        generator = torch.Generator().manual_seed(0)
        context_shape = widest.input_shape
        if kind.context is Context.HIDDEN and widest.hidden is not None:
            context_shape = widest.hidden.input_shape
        features, context = (
            torch.randn(8, *shape, generator=generator).to(config.dtype) for shape in (widest.shape, context_shape)
        )
        examples = GradientBatch((features, context), torch.ones_like(features))
        names = find_parameters_with_gradient(template, [examples])

        # Only the stacks are copied to the device, because only the structure of the template is used.
        fixed = {name: buffer.to(config.device, non_blocking=True) for name, buffer in buffers.items()}
        fixed |= stack.layout.unflatten(values.to(config.device, non_blocking=True))
        reached = {name: fixed.pop(name) for name in names}
        newborns = self._newborns[slot, blueprint] = _Newborns(template, len(sites), reached, fixed)
        return newborns


def _record_calls(population: Population, batch: Batch) -> list[GradientBatch]:
    """Features, contexts of blueprints and functional gradients ``[E, N, ...]`` at all slots."""
    most = population.config.examples_per_pass or batch.labels.shape[1]
    if batch.labels.shape[1] > most:
        parts = zip(torch.split(batch.inputs, most, 1), torch.split(batch.labels, most, 1), strict=True)
        recorded = [_record_calls(population, Batch(*part)) for part in parts]
        return [_join_calls(calls, dim=1) for calls in zip(*recorded, strict=True)]
    make_blend_op = prepare_slot_op(population, select_blended(population))
    recorded: list[list[GradientBatch]] = [[] for _ in range(population.table.slots)]
    leaves: list[list[Tensor]] = [[] for _ in range(population.table.slots)]

    def make_recording_op(slot: int, networks: range) -> SlotOp:
        blend = make_blend_op(slot, networks)

        def record(features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
            outputs = features if blend is None else blend(features, inputs, source)
            # A zero added to the features has the same gradient as the features.
            leaf = torch.zeros_like(outputs, requires_grad=True)
            contexts = {} if source is None else {Context.HIDDEN: source.detach()}
            recorded[slot].append(GradientBatch((outputs.detach(),), outputs.detach(), contexts))
            leaves[slot].append(leaf)
            return outputs + leaf

        return record

    with torch.enable_grad():
        host = {name: stacked.detach() for name, stacked in population.host.parameters.items()}
        logits = run_passes(build_passes(population, make_recording_op, keep_buffers=True), batch.inputs, host)
        # Losses are summed over examples and averaged over the positions of each.
        positions = batch.labels[0, 0].numel()
        # Summed separately, because on a GPU the loss function would sum in any order.
        losses = F.cross_entropy(logits.flatten(1, -2).mT, batch.labels.flatten(1), reduction="none")
        total = losses.sum() / positions
        gradients = iter(torch.autograd.grad(total, [leaf for part in leaves for leaf in part], materialize_grads=True))
    # Join the tensors of the passes over networks, in the dtype of the newborns' parameters.
    in_dtype = methodcaller("to", population.config.dtype)
    joined = [
        _join_calls([call._replace(gradients=next(gradients)) for call in calls], dim=0).map(in_dtype)
        for calls in recorded
    ]
    return [call._replace(contexts={**call.contexts, Context.NETWORK: batch.inputs}) for call in joined]


def _join_calls(calls: Sequence[GradientBatch], dim: int) -> GradientBatch:
    """Join recorded calls of different networks or examples along the axis ``dim``."""
    return GradientBatch(
        (torch.cat([call.inputs[0] for call in calls], dim),),
        torch.cat([call.gradients for call in calls], dim),
        {context: torch.cat([call.contexts[context] for call in calls], dim) for context in calls[0].contexts},
    )
