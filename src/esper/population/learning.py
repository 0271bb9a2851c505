"""Train every network of a population on its own data, in its own order, by optimizers that work row by row."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.engine.gradients import assess_health
from esper.engine.measurements import TrainingReport
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.devices import Deferred
from esper.numerics.random_streams import Stream, torch_generator
from esper.population.forward import ForwardPass, prepare_forward, select_blended, select_isolated
from esper.population.parameters import FlatParameters, SeedBank, SeedKind, StackedParameters, pad_to_shape
from esper.population.population import Population
from esper.tasks.instance import Data
from esper.tasks.suite import OptimizerSettings


class Batch(NamedTuple):
    """One minibatch per network."""

    inputs: Tensor
    """``[E, B, ...]``."""
    labels: Tensor
    """int64 ``[E, B]``, or ``[E, B, T]`` where every position has a label."""


def compute_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each network ``[E]``, over examples and, if they have any, positions.

    Logits are ``[E, N, classes]`` or ``[E, N, T, classes]``, labels ``[E, N]`` or ``[E, N, T]``.
    """
    return compute_label_losses(logits, labels).mean(1)


def compute_label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each label, ``[E, N]`` or ``[E, N * T]``; arguments as for `compute_losses`."""
    return F.cross_entropy(logits.flatten(1, -2).mT, labels.flatten(1), reduction="none")


def compute_accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of each network's labels that are classified correctly, ``[E]``; arguments as for `compute_losses`."""
    return compute_label_hits(logits, labels).mean(1)


def compute_label_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for each label that is classified correctly, else 0, ``[E, N]`` or ``[E, N * T]``."""
    # The same result as argmax, which is ten times slower where the classes are not innermost.
    return (logits.max(-1).indices == labels).to(logits.dtype).flatten(1)


def train(population: Population, batches: Iterable[Batch], frozen: Bools | None = None) -> TrainingReport:
    """Train a population; as `start_training`, but waits for the report."""
    return start_training(population, batches, frozen).fetch()


def start_training(
    population: Population, batches: Iterable[Batch], frozen: Bools | None = None
) -> Deferred[TrainingReport]:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they are at full alpha and everything else is
    fixed. The networks ``frozen``, bool ``[E]``, keep all values and buffers (None: all networks learn). The report
    must be fetched before any seed is added or removed.
    """
    population.execution.train(True)
    table, host, flat, device = population.table, population.host, population.flat, population.config.device

    # Hosts always learn, and seeds once they have germinated, except in frozen networks.
    frozen = np.zeros(population.size, np.bool_) if frozen is None else frozen
    learning_seeds = table.owning & (table.stage != Stage.GERMINATED) & ~frozen[:, None]
    by_bank = [learning_seeds[bank.block.owners.numpy(), kind.slot] for kind, bank in population.banks.items()]
    learning = torch.from_numpy(np.concatenate([~frozen, *by_bank])).to(device, non_blocking=True)
    frozen_rows = torch.from_numpy(frozen).to(device, non_blocking=True)
    saved_buffers = {name: buffer[frozen_rows] for name, buffer in host.buffers.items()} if frozen.any() else {}

    # Seeds of the latest decision do not take part yet. They are the last rows of their bank: the others are a view.
    banks: dict[SeedKind, SeedBank] = {}
    for kind, bank in population.banks.items():
        taking_part = table.stage[bank.block.owners.numpy(), kind.slot] != Stage.GERMINATED
        banks[kind] = bank.head(int(taking_part.nonzero()[0].max(initial=-1)) + 1)
    blocks = [host, *(bank.block for bank in banks.values())]

    # The passes are valid for all minibatches, because seeds change only with decisions.
    generators = make_generators(population, isolated=False)
    joint_passes = prepare_forward(population, select_blended(population), generators, banks)
    isolated = select_isolated(population)
    isolated_passes: Sequence[ForwardPass | None] = [None] * len(joint_passes)
    if isolated is not None:
        # Not the generators of the joint pass: whether there is an isolated pass depends on all networks.
        generators = make_generators(population, isolated=True)
        isolated_passes = prepare_forward(population, isolated, generators, banks)
    fixed_host = {name: stacked.detach() for name, stacked in host.parameters.items()}
    leaves = [leaf for block in blocks for leaf in block.parameters.values()]
    place_of_value = _locate_gradients(flat, blocks)
    no_gradient = flat.values.new_zeros(1)

    losses: list[Tensor] = []
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        # Pass by pass, and in each pass one part of the examples at a time, so that only one graph is in memory.
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
                # Summed, not averaged: a network's gradient must not depend on the number of networks.
                total = mean_losses.sum()
                if isolated_pass is not None:
                    total = total + compute_losses(isolated_pass.run(inputs, fixed_host), targets).sum()
                if most < examples:
                    # Weight each part by its number of examples, so that the parts add up to the minibatch's mean.
                    share = targets.shape[1] / examples
                    mean_losses, total = mean_losses * share, total * share
                by_leaf = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
                # The gradient of a pass is zero for the networks of other passes, so gradients are added up, which is
                # exact; leaf by leaf, as two may share one.
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
            # Not by multiplication, because a frozen network's gradient may be infinite or NaN.
            gradient = gradient.masked_fill(flat.expand_rows(~learning), 0.0)
        settings = population.config.optimizer
        if settings.clip_norm is not None:
            gradient = clip_by_network(flat, gradient, settings.clip_norm)
        optimizer_step(flat, gradient, learning, settings)

        losses.append(torch.cat(batch_losses))
        logits.append(torch.cat(batch_logits))
        labels.append(batch.labels)

    # Forward passes have changed the running statistics of frozen networks, too: restore them.
    for name, saved in saved_buffers.items():
        host.buffers[name][frozen_rows] = saved

    # All minibatches at once, as if they were networks.
    accuracies = compute_accuracies(torch.cat(logits), torch.cat(labels)).view(-1, population.size)
    results = (torch.stack(losses).mean(0), accuracies.mean(0), torch.stack(norms))
    return Deferred(results, partial(_make_report, population, learning_seeds))


def make_generators(population: Population, *, isolated: bool) -> list[torch.Generator]:
    """Generators for the hosts' random numbers in the next training steps, one per network; empty if none are drawn.

    They follow from a network's random seed and the number of its steps: they need not be saved.
    """
    if not population.execution.draws:
        return []
    steps = cast("list[float]", population.host.steps.tolist())
    return [
        torch_generator(network.seed, int(taken), int(isolated), Stream.HOST_NOISE)
        for network, taken in zip(population.specs.networks, steps, strict=True)
    ]


def _locate_gradients(flat: FlatParameters, blocks: Sequence[StackedParameters]) -> Tensor:
    """The place of each value's gradient, int64 ``[V]``, in the concatenated gradients of ``blocks``.

    They have the first rows of the blocks of ``flat``; after their gradients comes a single zero, for all other rows.
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
    """Norms ``[R]`` of the rows of gradients ``[r, P]``, hosts first, as returned by `FlatParameters.split_rows`."""
    hosts, *seeds = gradients
    # Two formulas, which differ in the last bit: policies observe these figures and were trained with exactly these.
    return torch.cat([hosts.square().sum(1).sqrt(), *(rows.norm(dim=1) for rows in seeds)])


def _make_report(
    population: Population, learning_seeds: Bools, losses: Floats, accuracies: Floats, norms: Floats
) -> TrainingReport:
    """The report from losses and accuracies ``[E]`` and the norms ``[T, R]`` of all rows in T minibatches."""
    # Map rows to networks and slots; slots without a seed get 0.
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


# Row-wise optimizers: every row of a `FlatParameters` has its own learning rate and step count. Each gives the same
# result as its namesake in `torch.optim` applied to the row's module alone.

ADAM_EPSILON = 1e-8
CLIP_EPSILON = 1e-6


@torch.no_grad()
def optimizer_step(flat: FlatParameters, gradient: Tensor, learning: Tensor, settings: OptimizerSettings) -> None:
    """Take one step in place on the rows ``learning``, bool ``[R]``; other rows keep their values and step counts.

    The gradient ``[V]`` must be zero in rows that are not learning.
    AdamW is that of Loshchilov and Hutter 2019, with the bias correction of Kingma and Ba 2015, algorithm 1. As they
    remark, a step ``rate * (mean / c1) / (sqrt(square / c2) + epsilon)`` costs less as
    ``(rate * sqrt(c2) / c1) * mean / (sqrt(square) + epsilon * sqrt(c2))``, whose factors are of rows, not of values.
    SGD with momentum is that of `torch.optim.SGD`: the velocity starts as the first gradient, without dampening.
    """
    learning = learning.to(flat.steps)
    flat.steps.add_(learning)
    rate = flat.learning_rates * learning
    if settings.name == "sgd":
        if settings.weight_decay:
            gradient = torch.addcmul(gradient, flat.expand_rows(settings.weight_decay * learning), flat.values)
        velocity = flat.moments["velocity"]
        velocity.mul_(settings.momentum).add_(gradient)
        flat.values.addcmul_(flat.expand_rows(rate), velocity, value=-1)
        return

    # Bias corrections by row: seeds are younger than their hosts.
    beta1, beta2 = settings.betas
    steps = flat.steps.clamp(min=1)
    root = (1 - beta2**steps).sqrt()
    # All rows at once: those that do not learn have a rate of zero.
    mean, square = flat.moments["mean"], flat.moments["square"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    # Decoupled weight decay, then the step.
    if settings.weight_decay:
        flat.values.mul_(flat.expand_rows(1 - rate * settings.weight_decay))
    denominator = square.sqrt().add_(flat.expand_rows(ADAM_EPSILON * root))
    factor = flat.expand_rows(rate * root / (1 - beta1**steps))
    flat.values.addcdiv_(factor.mul_(mean), denominator, value=-1)


@torch.no_grad()
def clip_by_network(flat: FlatParameters, gradient: Tensor, clip_norm: float) -> Tensor:
    """The gradient ``[V]``, scaled so that no network's total norm exceeds ``clip_norm``.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: ``min(1, clip_norm / (norm + 1e-6))``.
    """
    owners = flat.owners.to(gradient.device, non_blocking=True)
    norms = flat.sum_by_network(gradient.square()).sqrt()
    factors = (clip_norm / (norms + CLIP_EPSILON)).clamp(max=1)
    return gradient * flat.expand_rows(factors[owners])


# The data that networks learn from.


def draw_shuffled_order(examples: int, count: int, rng: np.random.Generator) -> Ints:
    """``count`` indices of examples: as many shuffled epochs as needed, the last one truncated."""
    epochs = -(-count // examples)
    return np.concatenate([rng.permutation(examples) for _ in range(epochs)])[:count]


def stack_data(data: Sequence[Data], device: torch.device) -> Batch:
    """Stack all examples of E data sets of equal size, ``[E, N, ...]``."""
    inputs, labels = torch.stack([part.inputs for part in data]), torch.stack([part.labels for part in data])
    return Batch(inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True))


class TrainingStream:
    """Minibatches ``[E, B, ...]`` for E networks, each of its own data in its own shuffled epochs.

    Memory is allocated for ``capacity`` examples per network, and more if needed.
    """

    def __init__(
        self, data: Sequence[Data], orders: Sequence[Ints], batch_size: int, capacity: int, device: torch.device
    ) -> None:
        self._inputs, self._labels = (
            torch.stack([_pad_examples(part, capacity) for part in parts]).to(device, non_blocking=True)
            for parts in ([part.inputs for part in data], [part.labels for part in data])
        )
        # Orders are indices into the concatenated examples of all networks, so that one gather serves them all.
        offsets = np.arange(len(data))[:, None] * capacity
        self._order = torch.from_numpy(np.stack(orders) + offsets).to(device, non_blocking=True)
        self._batch_size = batch_size

    def replace(self, network: int, data: Data, order: Ints | None = None) -> None:
        """Replace the data of ``network``, keeping its order of examples or taking a new one of the same length."""
        networks, capacity = self._labels.shape[:2]
        extra = len(data) - capacity
        if extra > 0:
            # More room per network changes the places of all examples.
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
        """Yield ``count`` minibatches; network e starts with its minibatch number ``first[e]``."""
        start = torch.from_numpy(first * self._batch_size).to(self._order, non_blocking=True)
        places = start.unsqueeze(1) + torch.arange(self._batch_size, device=start.device)
        for number in range(count):
            index = self._order.gather(1, places + number * self._batch_size)
            inputs = self._inputs.flatten(0, 1).index_select(0, index.flatten())
            labels = self._labels.flatten(0, 1).index_select(0, index.flatten())
            yield Batch(inputs.view(*index.shape, *inputs.shape[1:]), labels.view(*index.shape, *labels.shape[1:]))


def _pad_examples(tensor: Tensor, count: int) -> Tensor:
    return pad_to_shape(tensor, (count, *tensor.shape[1:]))
