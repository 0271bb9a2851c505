"""Train every network of a population: each on its own data in its own order, one optimizer step per minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.engine.gradients import assess_health
from esper.engine.measurements import TrainingReport
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.deferred import Deferred
from esper.numerics.random_streams import Stream, torch_generator
from esper.population.forward import ForwardPass, prepare_forward, select_blended, select_isolated
from esper.population.optimizers import clip_by_network, optimizer_step
from esper.population.parameters import FlatParameters, SeedBank, SeedKind, StackedParameters, pad_to_shape
from esper.population.population import Population
from esper.tasks.instance import Data


class Batch(NamedTuple):
    """One minibatch per network."""

    inputs: Tensor
    """``[E, B, ...]``."""
    labels: Tensor
    """int64 ``[E, B]``, or ``[E, B, T]`` where every position has one."""


def compute_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each network, ``[E]``: over its examples and, if there are any, their positions.

    From logits ``[E, N, classes]`` or ``[E, N, T, classes]``, and labels ``[E, N]`` or ``[E, N, T]``.
    """
    return compute_label_losses(logits, labels).mean(1)


def compute_label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each label, ``[E, N]`` or ``[E, N * T]``; shapes as of `compute_losses`."""
    return F.cross_entropy(logits.flatten(1, -2).mT, labels.flatten(1), reduction="none")


def compute_accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of each network's labels that are classified correctly, ``[E]``; shapes as of `compute_losses`."""
    return compute_label_hits(logits, labels).mean(1)


def compute_label_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for each label that is classified correctly, else 0, ``[E, N]`` or ``[E, N * T]``."""
    # The first largest, as of argmax, which is ten times slower where the classes are not innermost.
    return (logits.max(-1).indices == labels).to(logits.dtype).flatten(1)


def train(population: Population, batches: Iterable[Batch], frozen: Bools | None = None) -> TrainingReport:
    """Train a population: the report of `start_training`, waited for."""
    return start_training(population, batches, frozen).fetch()


def start_training(
    population: Population, batches: Iterable[Batch], frozen: Bools | None = None
) -> Deferred[TrainingReport]:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they count fully and all else is fixed. The
    networks ``frozen``, bool ``[E]``, keep all their values and buffers (None: all learn). The report must be fetched
    before seeds come or go.
    """
    population.execution.train(True)
    table, host, flat, device = population.table, population.host, population.flat, population.config.device

    # Hosts always learn, seeds once they have germinated, and nothing does in a frozen network.
    frozen = np.zeros(population.size, np.bool_) if frozen is None else frozen
    learning_seeds = table.owning & (table.stage != Stage.GERMINATED) & ~frozen[:, None]
    by_bank = [learning_seeds[bank.block.owners.numpy(), kind.slot] for kind, bank in population.banks.items()]
    learning = torch.from_numpy(np.concatenate([~frozen, *by_bank])).to(device, non_blocking=True)
    frozen_rows = torch.from_numpy(frozen).to(device, non_blocking=True)
    saved_buffers = {name: buffer[frozen_rows] for name, buffer in host.buffers.items()} if frozen.any() else {}

    # Seeds that came with the latest decision take no part yet. They are the last of their bank, so the others are a
    # view of it, and no minibatch has to gather them.
    banks = {kind: bank.head(_count_taking_part(table, kind, bank)) for kind, bank in population.banks.items()}
    blocks = [host, *(bank.block for bank in banks.values())]

    # The passes hold for all minibatches: seeds come and go with decisions only.
    generators = make_generators(population, isolated=False)
    joint_passes = prepare_forward(population, select_blended(population), generators, banks).passes
    isolated = select_isolated(population)
    isolated_passes: Sequence[ForwardPass | None] = [None] * len(joint_passes)
    if isolated is not None:
        # Others than in the joint pass: whether there is an isolated one depends on all networks.
        generators = make_generators(population, isolated=True)
        isolated_passes = prepare_forward(population, isolated, generators, banks).passes
    fixed_host = {name: stacked.detach() for name, stacked in host.parameters.items()}
    leaves = [leaf for block in blocks for leaf in block.parameters.values()]
    place_of_value = _locate_gradients(flat, blocks)
    no_gradient = flat.values.new_zeros(1)

    losses: list[Tensor] = []
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        # Pass by pass, and in each some examples after the others, so that only one graph is held at a time.
        sums: list[Tensor] = []
        batch_losses: list[Tensor] = []
        batch_logits: list[Tensor] = []
        examples = batch.labels.shape[1]
        most = population.config.examples_per_pass or examples
        for joint_pass, isolated_pass in zip(joint_passes, isolated_passes, strict=True):
            pass_inputs, pass_labels = batch.inputs[joint_pass.networks], batch.labels[joint_pass.networks]
            part_losses: list[Tensor] = []
            part_logits: list[Tensor] = []
            for inputs, targets in zip(
                torch.split(pass_inputs, most, 1), torch.split(pass_labels, most, 1), strict=True
            ):
                outputs = joint_pass.run(inputs, host.parameters)
                mean_losses = compute_losses(outputs, targets)
                # Summed, not averaged: no network's gradient may depend on how many others there are.
                total = mean_losses.sum()
                if isolated_pass is not None:
                    total = total + compute_losses(isolated_pass.run(inputs, fixed_host), targets).sum()
                if most < examples:
                    # Each part by its share of the examples, so that all of them add up to the minibatch's mean.
                    share = targets.shape[1] / examples
                    mean_losses, total = mean_losses * share, total * share
                by_leaf = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
                # A pass's gradient has the size of all networks and is zero in those of other passes. So gradients are
                # added up, which for other networks is exact, and not kept; leaf by leaf, as two may share one.
                if sums:
                    for index, summand in enumerate(by_leaf):
                        sums[index] = sums[index] + summand
                else:
                    sums = list(by_leaf)
                part_losses.append(mean_losses.detach())
                part_logits.append(outputs.detach())
            batch_losses.append(reduce(torch.add, part_losses))
            batch_logits.append(part_logits[0] if len(part_logits) == 1 else torch.cat(part_logits, 1))

        # Back from named parameters to one vector [V] for the optimizer.
        gradient = torch.cat([*(part.reshape(-1) for part in sums), no_gradient]).index_select(0, place_of_value)
        norms.append(compute_row_norms(flat.split_rows(gradient)))
        if frozen.any():
            # Not by multiplication: a frozen network's gradient need not be finite.
            gradient = gradient.masked_fill(flat.expand_rows(~learning), 0.0)
        settings = population.config.optimizer
        if settings.clip_norm is not None:
            gradient = clip_by_network(flat, gradient, settings.clip_norm)
        optimizer_step(flat, gradient, learning, settings)

        losses.append(torch.cat(batch_losses))
        logits.append(torch.cat(batch_logits))
        labels.append(batch.labels)

    # A forward pass of hosts with running statistics has changed those of frozen networks, too.
    for name, saved in saved_buffers.items():
        host.buffers[name][frozen_rows] = saved

    # All minibatches at once, as if they were networks.
    accuracies = compute_accuracies(torch.cat(logits), torch.cat(labels)).view(-1, population.size)
    results = (torch.stack(losses).mean(0), accuracies.mean(0), torch.stack(norms))
    return Deferred(results, partial(_make_report, population, learning_seeds))


def make_generators(population: Population, *, isolated: bool) -> list[torch.Generator]:
    """Generators of what hosts draw from now on in training, one per network; none if they draw nothing.

    They follow from a network's random seed and the steps it has taken, so they need not be saved, and no network
    depends on its neighbours.
    """
    if not population.execution.draws:
        return []
    steps = cast("list[float]", population.host.steps.tolist())
    return [
        torch_generator(network.seed, int(taken), int(isolated), Stream.HOST_NOISE)
        for network, taken in zip(population.specs.networks, steps, strict=True)
    ]


def _count_taking_part(table: SeedTable, kind: SeedKind, bank: SeedBank) -> int:
    """How many of the bank's rows there are up to the last one whose seed has more than germinated."""
    taking_part = table.stage[bank.block.owners.numpy(), kind.slot] != Stage.GERMINATED
    return int(taking_part.nonzero()[0].max(initial=-1)) + 1


def _locate_gradients(flat: FlatParameters, blocks: Sequence[StackedParameters]) -> Tensor:
    """Where each value's gradient stands, int64 ``[V]``, if those of all ``blocks`` are laid end to end.

    The blocks are the first rows of those of ``flat``, and their named parameters follow one another, each with all its
    rows. Behind them stands one zero, for the values of the other rows.
    """
    count = sum(block.values.numel() for block in blocks)
    positions = torch.arange(count, device=flat.values.device)
    places: list[Tensor] = []
    first = 0
    for block, whole in zip(blocks, flat.blocks, strict=True):
        by_parameter: list[Tensor] = []
        for size in block.layout.sizes:
            by_parameter.append(positions[first : first + len(block) * size].view(len(block), size))
            first += len(block) * size
        places.append(torch.cat(by_parameter, 1).flatten())
        if len(block) < len(whole):
            places.append(positions.new_full((whole.values.numel() - block.values.numel(),), count))
    return torch.cat(places)


def compute_row_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norms ``[R]`` of the rows of gradients ``[r, P]``, the hosts' first, as of `FlatParameters.split_rows`."""
    hosts, *seeds = gradients
    # Two formulas, which differ in the last bit: policies see these figures and were trained with just these.
    return torch.cat([hosts.square().sum(1).sqrt(), *(rows.norm(dim=1) for rows in seeds)])


def _make_report(
    population: Population, learning_seeds: Bools, losses: Floats, accuracies: Floats, norms: Floats
) -> TrainingReport:
    """The report from losses and accuracies ``[E]`` and the norms ``[T, R]`` of all rows in T minibatches."""
    # From rows to networks and slots; 0 in slots without a seed.
    table = population.table
    host_norms, bank_norms = np.split(norms, [population.size], axis=1)
    seed_norms = np.zeros((len(norms), *table.stage.shape))
    first = 0
    for kind, bank in population.banks.items():
        seed_norms[:, bank.block.owners.numpy(), kind.slot] = bank_norms[:, first : first + len(bank)]
        first += len(bank)

    health = assess_health(
        host_norms,
        seed_norms,
        host_parameters=population.host_parameters,
        seed_parameters=population.specs.costs.parameters.resident(table),
        fossils=table.stage == Stage.FOSSILIZED,
        learning=learning_seeds,
        settings=population.config.gradient_health,
    )
    return TrainingReport(losses, accuracies, host_norms[-1], seed_norms[-1], health)


# The data that networks learn from.


def draw_shuffled_order(examples: int, count: int, rng: np.random.Generator) -> Ints:
    """``count`` indices into ``examples``: as many whole shuffled epochs as needed, the last one cut."""
    epochs = -(-count // examples)
    return np.concatenate([rng.permutation(examples) for _ in range(epochs)])[:count]


def stack_data(data: Sequence[Data], device: torch.device) -> Batch:
    """All examples of E data sets of one size, ``[E, N, ...]``."""
    inputs, labels = torch.stack([part.inputs for part in data]), torch.stack([part.labels for part in data])
    return Batch(inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True))


class TrainingStream:
    """Minibatches ``[E, B, ...]`` for E networks, one after the other.

    Networks may have different numbers of examples; each passes through its own set in its own shuffled epochs. Room is
    kept for ``capacity`` examples per network, and more when it is needed.
    """

    def __init__(
        self, data: Sequence[Data], orders: Sequence[Ints], batch_size: int, capacity: int, device: torch.device
    ) -> None:
        inputs = torch.stack([_pad_examples(part.inputs, capacity) for part in data])
        labels = torch.stack([_pad_examples(part.labels, capacity) for part in data])
        self._inputs: Tensor = inputs.to(device, non_blocking=True)
        self._labels: Tensor = labels.to(device, non_blocking=True)
        # Orders index the examples of all networks, one after the other: one gather then serves all of them.
        offsets = np.arange(len(data))[:, None] * capacity
        self._order = torch.from_numpy(np.stack(orders) + offsets).to(device, non_blocking=True)
        self._batch_size = batch_size

    def replace(self, network: int, data: Data, order: Ints | None = None) -> None:
        """From now on ``network`` draws from other data, in the same order as before or in a new one of its length."""
        networks, capacity = self._labels.shape[:2]
        extra = len(data) - capacity
        if extra > 0:
            # Room for more examples in every network moves the places of all.
            self._inputs, self._labels = (
                torch.cat([part, part.new_zeros(networks, extra, *part.shape[2:])], 1)
                for part in (self._inputs, self._labels)
            )
            self._order += torch.arange(networks, device=self._order.device).unsqueeze(1) * extra
            capacity += extra
        self._inputs[network] = _pad_examples(data.inputs, capacity).to(self._inputs, non_blocking=True)
        self._labels[network] = _pad_examples(data.labels, capacity).to(self._labels, non_blocking=True)
        if order is not None:
            self._order[network] = torch.from_numpy(order + network * capacity).to(self._order, non_blocking=True)

    def draw_batches(self, first: Ints, count: int) -> Iterator[Batch]:
        """``count`` minibatches; network e begins with its minibatch number ``first[e]``."""
        start = torch.from_numpy(first * self._batch_size).to(self._order, non_blocking=True)
        places = start.unsqueeze(1) + torch.arange(self._batch_size, device=start.device)
        for number in range(count):
            index = self._order.gather(1, places + number * self._batch_size)
            inputs = self._inputs.flatten(0, 1).index_select(0, index.flatten())
            labels = self._labels.flatten(0, 1).index_select(0, index.flatten())
            yield Batch(inputs.view(*index.shape, *inputs.shape[1:]), labels.view(*index.shape, *labels.shape[1:]))


def _pad_examples(tensor: Tensor, count: int) -> Tensor:
    return pad_to_shape(tensor, (count, *tensor.shape[1:]))
