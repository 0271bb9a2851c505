"""Train every network of a population: each on its own data in its own order, one optimizer step per minibatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from esper.engine.measurements import TrainingReport
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.deferred import Deferred
from esper.population.forward import ForwardPass, prepare_forward, select_blended, select_isolated
from esper.population.gradients import compute_row_norms, measure_health, split_by_slot
from esper.population.optimizers import clip_by_network, optimizer_step
from esper.population.parameters import FlatParameters, concatenate_flat
from esper.population.population import Population
from esper.tasks.instance import Data


def draw_shuffled_order(examples: int, count: int, rng: np.random.Generator) -> Ints:
    """``count`` indices into ``examples``: as many whole shuffled epochs as needed, the last one cut."""
    epochs = -(-count // examples)
    return np.concatenate([rng.permutation(examples) for _ in range(epochs)])[:count]


class TrainingStream:
    """Minibatches ``[E, B, ...]`` for E networks, one after the other.

    Networks may have different numbers of examples; each passes through its own set in its own shuffled epochs. Room is
    kept for ``capacity`` examples per network, and more when it is needed.
    """

    def __init__(
        self,
        data: Sequence[Data],
        orders: Sequence[Ints],
        batch_size: int,
        capacity: int,
        device: torch.device,
    ) -> None:
        longest = capacity
        self._inputs: Tensor = torch.stack([_pad_to(part.inputs, longest) for part in data]).to(device)
        self._labels: Tensor = torch.stack([_pad_to(part.labels, longest) for part in data]).to(device)
        offsets = np.arange(len(data))[:, None] * longest
        self._order = torch.from_numpy(np.stack(orders) + offsets).to(device)
        self._batch_size = batch_size

    def replace(self, network: int, data: Data, order: Ints | None = None) -> None:
        """From now on ``network`` draws from other data, in the same order as before or in a new one of its length."""
        self._make_room(len(data))
        longest = self._inputs.shape[1]
        self._inputs[network] = _pad_to(data.inputs, longest).to(self._inputs, non_blocking=True)
        self._labels[network] = _pad_to(data.labels, longest).to(self._labels, non_blocking=True)
        if order is not None:
            self._order[network] = torch.from_numpy(order + network * longest).to(self._order, non_blocking=True)

    def _make_room(self, examples: int) -> None:
        """Let every network have that many examples."""
        networks, longest = self._labels.shape
        extra = examples - longest
        if extra <= 0:
            return
        self._inputs = torch.cat([self._inputs, self._inputs.new_zeros(networks, extra, *self._inputs.shape[2:])], 1)
        self._labels = torch.cat([self._labels, self._labels.new_zeros(networks, extra)], 1)
        self._order += torch.arange(networks, device=self._order.device).unsqueeze(1) * extra

    def take(self, first: Ints, count: int) -> Iterator[Batch]:
        """``count`` minibatches; network e begins with its minibatch number ``first[e]``."""
        start = torch.from_numpy(first * self._batch_size).to(self._order, non_blocking=True)
        places = start.unsqueeze(1) + torch.arange(self._batch_size, device=start.device)
        for number in range(count):
            yield self._gather(self._order.gather(1, places + number * self._batch_size))

    def _gather(self, index: Tensor) -> Batch:
        flat = index.flatten()
        inputs = self._inputs.flatten(0, 1).index_select(0, flat).view(*index.shape, *self._inputs.shape[2:])
        return Batch(inputs, self._labels.flatten().index_select(0, flat).view_as(index))


def stack_data(data: Sequence[Data], device: torch.device) -> Batch:
    """All examples of E data sets of one size, ``[E, N, ...]``."""
    return Batch(
        torch.stack([part.inputs for part in data]).to(device), torch.stack([part.labels for part in data]).to(device)
    )


def _pad_to(tensor: Tensor, length: int) -> Tensor:
    filler = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, filler])


class Batch(NamedTuple):
    """One minibatch per network."""

    inputs: Tensor
    """``[E, B, ...]``."""
    labels: Tensor
    """int64 ``[E, B]``."""


def compute_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each network, ``[E]``, from logits ``[E, N, classes]`` and labels ``[E, N]``."""
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)


def compute_accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Fraction of each network's examples that are classified correctly, ``[..., E]``.

    From logits ``[..., E, N, classes]`` and labels ``[..., E, N]``.
    """
    # The first largest, as argmax says too, which is ten times slower where the classes are not innermost.
    return (logits.max(-1).indices == labels).to(logits.dtype).mean(-1)


def train(population: Population, batches: Iterable[Batch], resting: Bools | None = None) -> TrainingReport:
    """Train a population: the report of `start_training`, waited for."""
    return start_training(population, batches, resting).fetch()


def start_training(
    population: Population, batches: Iterable[Batch], resting: Bools | None = None
) -> Deferred[TrainingReport]:
    """Take one optimizer step per minibatch in every network; hosts and blended seeds learn together.

    Isolated seeds (stage TRAINING) learn from a second pass in which they count fully and all else is frozen. The
    networks' losses are added up, so no network's gradient depends on how many others there are. The networks
    ``resting``, bool ``[E]``, keep all their values and buffers (None: all learn). The report must be fetched before
    seeds come or go.
    """
    population.execution.train(True)
    rest = _RestingNetworks(population, resting) if resting is not None and resting.any() else None
    flat = population.flat
    started = _select_learning_rows(population)
    if rest is not None:
        started &= ~rest.rows
    objective = _Objective(population)
    losses: list[Tensor] = []
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        learned = objective(batch)
        _update(population, flat, learned.gradients, started, rest)
        losses.append(learned.losses)
        logits.append(learned.logits)
        labels.append(batch.labels)
        norms.append(compute_row_norms(learned.gradients))
    if rest is not None:
        rest.restore_buffers(population)
    accuracies = compute_accuracies(torch.stack(logits), torch.stack(labels))
    learning = _learning_seeds(population.table) & (True if resting is None else ~resting[:, None])

    def report(loss: Floats, accuracy: Floats, by_row: Floats) -> TrainingReport:
        hosts, seeds = split_by_slot(population, by_row)
        return TrainingReport(loss, accuracy, hosts[-1], seeds[-1], measure_health(population, hosts, seeds, learning))

    return Deferred((torch.stack(losses).mean(0), accuracies.mean(0), torch.stack(norms)), report)


class _RestingNetworks:
    """Networks that must not change while the others learn."""

    def __init__(self, population: Population, resting: Bools) -> None:
        networks = torch.from_numpy(resting)
        self.rows = networks[population.flat.owners].to(population.config.device, non_blocking=True)
        """The rows that belong to them, bool ``[R]``."""
        self._networks = networks.to(population.config.device, non_blocking=True)
        self._buffers = {name: buffer[self._networks] for name, buffer in population.host.buffers.items()}

    def restore_buffers(self, population: Population) -> None:
        for name, buffer in population.host.buffers.items():
            buffer[self._networks] = self._buffers[name]


class _MinibatchResult(NamedTuple):
    """What a minibatch says of some networks."""

    losses: Tensor
    """``[e]``."""
    logits: Tensor
    """``[e, B, classes]``."""
    gradients: list[Tensor]
    """Those of all rows, ``[R, P]`` per block; zero where nothing depends on them."""


class _Objective:
    """Differentiates the sum of the networks' losses, pass by pass, so that only one pass's graph is held at a time."""

    def __init__(self, population: Population) -> None:
        self._blocks = population.flat.blocks
        self._leaves = [leaf for block in self._blocks for leaf in block.parameters.values()]
        self._host = population.host.parameters
        self._frozen = {name: stacked.detach() for name, stacked in self._host.items()}
        self._whole = prepare_forward(population, select_blended(population)).passes
        isolated = select_isolated(population)
        self._alone = [None] * len(self._whole) if isolated is None else prepare_forward(population, isolated).passes

    def __call__(self, batch: Batch) -> _MinibatchResult:
        found = [self._one(*passes, batch) for passes in zip(self._whole, self._alone, strict=True)]
        if len(found) == 1:
            return found[0]
        by_block = zip(*(one.gradients for one in found), strict=True)
        return _MinibatchResult(
            torch.cat([one.losses for one in found]),
            torch.cat([one.logits for one in found]),
            [torch.stack(parts).sum(0) for parts in by_block],
        )

    def _one(self, whole: ForwardPass, alone: ForwardPass | None, batch: Batch) -> _MinibatchResult:
        inputs, labels = batch.inputs[whole.networks], batch.labels[whole.networks]
        logits = whole.run(inputs, self._host)
        losses = compute_losses(logits, labels)
        total = losses.sum()
        if alone is not None:
            total = total + compute_losses(alone.run(inputs, self._frozen), labels).sum()
        found = iter(torch.autograd.grad(total, self._leaves, materialize_grads=True, allow_unused=True))
        gradients = [block.layout.flatten([next(found) for _ in block.parameters]) for block in self._blocks]
        return _MinibatchResult(losses.detach(), logits.detach(), gradients)


def _learning_seeds(table: SeedTable) -> Bools:
    """``[E, S]``: where there is a seed that learns, as all do after their germination."""
    return table.owning & (table.stage != Stage.GERMINATED)


def _select_learning_rows(population: Population) -> Tensor:
    """Bool ``[R]``: which of the population's rows have begun to learn: hosts always, seeds after germination."""
    seeds = _learning_seeds(population.table)
    banks = [seeds[bank.block.owners.numpy(), kind.slot] for kind, bank in population.banks.items()]
    rows = np.concatenate([np.ones(population.size, np.bool_), *banks])
    return torch.from_numpy(rows).to(population.config.device, non_blocking=True)


def _update(
    population: Population,
    flat: FlatParameters,
    gradients: Sequence[Tensor],
    started: Tensor,
    rest: _RestingNetworks | None,
) -> None:
    settings = population.config.optimizer
    gradient = concatenate_flat(gradients)
    if rest is not None:
        # Not by multiplication: a resting network's gradient need not be finite.
        gradient = gradient.masked_fill(flat.spread(rest.rows), 0.0)
    if settings.clip_norm is not None:
        gradient = clip_by_network(flat, gradient, population.size, settings.clip_norm)
    optimizer_step(flat, gradient, started, settings)
