"""How much memory a network takes, and how many of them fit into a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from esper.experiments.doctor.devices import Device
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.tasks.data import Data
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.training.learning import Batch, stack_data, train
from esper.training.parameters import SeedKind
from esper.training.population import Fossils, Population
from esper.training.prefix_sharing import forward_variants, toggle_slots

VALIDATION_TENSORS = 4
"""As large as the largest one, that validation holds at a time: torch's profiler saw 3.2 to 4.2 times as much at most,
over all suites."""
_SAMPLED = 16
"""Instances of which the one with the most training data is taken."""
_SEED = 0


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for."""

    data: int
    """Training and validation data, and the order of the former."""
    values: int
    gradients: int
    optimizer: int
    """Its moments, and which row each value belongs to."""
    snapshot: int
    """The governor's."""
    activations: int
    """That the forward pass of a minibatch keeps for the backward pass."""
    validation: int
    """While all counterfactuals are measured, about."""

    @property
    def total(self) -> int:
        """At a time: training and validation take turns."""
        lasting = self.data + self.values + self.optimizer + self.snapshot
        return lasting + max(self.gradients + self.activations, self.validation)

    def less(self, other: Memory) -> Memory:
        """Part by part."""
        return Memory(*(own - its for own, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class SuiteMemory:
    """What a network of a suite takes, and how many fit into each device."""

    suite: str
    network: Memory
    """Grown as far as it can: with the largest seed in every slot."""
    networks: dict[str, int]
    """By device; without those whose memory is unknown."""


def suite_memory(name: str, devices: Sequence[Device], available: int | None) -> SuiteMemory:
    """Measured on the CPU; ``available`` are the bytes that the machine has left for it."""
    network = per_network(get_suite(name))
    sizes = {device.name: available if device.memory is None else device.memory for device in devices}
    return SuiteMemory(name, network, {one: size // network.total for one, size in sizes.items() if size is not None})


def per_network(suite: Suite) -> Memory:
    """What each further network takes."""
    return measured(suite, 2).less(measured(suite, 1))


def measured(suite: Suite, networks: int) -> Memory:
    """What a population of grown networks takes."""
    instance = max(suite.sample(_SAMPLED, "train", np.random.default_rng(_SEED)), key=lambda one: one.train_size)
    instances = [instance] * networks
    fossils = [_largest_seeds(Episodes(suite, [instance], Rules()).population)] * networks
    episodes = Episodes(suite, instances, Rules(), fossils=fossils)
    population, pool = episodes.population, episodes.population.flat
    data = suite.data(instance, "train")
    order = suite.steps * suite.batches_per_step * suite.batch_size * torch.int64.itemsize
    values = pool.values.nbytes
    return Memory(
        data=networks * (_size(data.inputs, data.labels) + order) + _size(*episodes.validation),
        values=values,
        gradients=values,
        optimizer=_size(*pool.moments.values(), pool.row_of_value),
        snapshot=values,
        activations=_activations(population, stack_data([_first(data, suite.batch_size)] * networks, episodes.device)),
        validation=VALIDATION_TENSORS * _largest_in_validation(population, episodes.validation),
    )


def _largest_seeds(population: Population) -> Fossils:
    """The compatible blueprint with the most parameters in each slot."""
    specs = population.specs
    (parameters,) = specs.costs.parameters.blueprints * specs.compatible
    return tuple(SeedKind(slot, int(of_slot.argmax())) for slot, of_slot in enumerate(parameters))


def _first(data: Data, count: int) -> Data:
    return Data(data.inputs[:count], data.labels[:count])


def _activations(population: Population, batch: Batch) -> int:
    kept = _Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, _as_it_is):
        train(population, [batch])
    # Parameters are kept by the population anyway.
    return sum(kept.sizes.values()) - kept.sizes.get(_place(population.flat.values), 0)


def _largest_in_validation(population: Population, batch: Batch) -> int:
    """With gradients, whose needs tell how large tensors are; validation itself keeps none of them."""
    population.execution.train(False)
    kept, slots = _Kept(), range(population.table.slots)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, _as_it_is):
        forward_variants(population, toggle_slots(population, slots), batch.inputs, shared=population.shares_prefixes)
    return max(kept.sizes.values())


class _Kept:
    """The memory that a graph keeps: many tensors may share one piece of it."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        """Bytes by address."""

    def keep(self, tensor: Tensor) -> Tensor:
        self.sizes[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
