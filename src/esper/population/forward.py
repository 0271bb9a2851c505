"""Forward passes of a population: which seeds take part, at what alpha, and in how many parts they are computed.

A slot op takes features ``[E, N, ...]`` and changes only the rows of networks that have a seed: one gather, one grouped
call per bank, one scatter. So the cost of a slot is that of its seeds, however many networks have none.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from esper.growth.blueprints.registry import Context
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Bools, Float32s, Ints
from esper.population.execution import Parameters, SlotOp
from esper.population.parameters import SeedBank, SeedKind
from esper.population.population import STRATEGIES, Population, Strategy


@dataclass(frozen=True)
class BankSlice:
    """The seeds of one bank that take part in a pass."""

    bank: SeedBank
    owners: Ints
    """The networks of the seeds, ``[r]``."""
    rows: Tensor | None
    """Rows of the seeds in the bank, int64 ``[r]``; None: all rows, in order."""
    learning: Tensor | None = None
    """Bool ``[r]``: which seeds' parameters get a gradient; None: all."""

    def choose_context(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        """The second argument of the seeds' blueprints; the features again, if they have no context."""
        match self.bank.template.context:
            case Context.NETWORK:
                return inputs
            case Context.HIDDEN:
                assert source is not None, "such seeds grow only where there are hidden units"
                return source
            case _:
                return features

    def compute_contributions(self, features: Tensor, context: Tensor) -> Tensor:
        """The seeds' contributions at full alpha, from the owners' features and the context, all ``[r, N, ...]``."""
        parameters, buffers = self.bank.block.parameters, self.bank.block.buffers
        if self.rows is not None:
            parameters = {name: stacked.index_select(0, self.rows) for name, stacked in parameters.items()}
            buffers = {name: stacked.index_select(0, self.rows) for name, stacked in buffers.items()}
        if self.learning is not None:
            parameters = {
                name: torch.where(_align_rows(self.learning, stacked), stacked, stacked.detach())
                for name, stacked in parameters.items()
            }
        return self.bank.call(parameters, buffers, features, context)


@dataclass(frozen=True)
class SlotSeeds:
    """The seeds of one slot that take part in a pass, all banks together: r seeds of r different networks."""

    slices: Sequence[BankSlice]
    rows: Tensor
    """Rows of the features that the seeds change, int64 ``[r]``: the owners, counted from the pass's first network."""

    @property
    def owners(self) -> Ints:
        """The networks they belong to, ``[r]``."""
        return np.concatenate([part.owners for part in self.slices])

    @property
    def sizes(self) -> list[int]:
        """Number of seeds of each bank."""
        return [len(part.owners) for part in self.slices]


@dataclass(frozen=True)
class BlendOp:
    """``features + alpha * contribution`` for the networks that have a seed."""

    seeds: SlotSeeds
    alpha: Tensor
    """``[r]``."""

    def __call__(self, features: Tensor, inputs: Tensor, source: Tensor | None) -> Tensor:
        seeds = self.seeds
        # One gather for all banks, because its backward pass is a costly scatter over all networks.
        feature_parts = torch.split(gather_rows(features, seeds.rows), seeds.sizes)
        parts = zip(seeds.slices, feature_parts, torch.split(seeds.rows, seeds.sizes), strict=True)
        contributions: list[Tensor] = []
        for part, h, rows in parts:
            context = part.choose_context(features, inputs, source)
            contributions.append(
                part.compute_contributions(h, h if context is features else gather_rows(context, rows))
            )

        # Joined in the features' memory order: the scatter need not copy.
        order = _memory_order(features)
        joined = _undo_permute(torch.cat([contribution.permute(order) for contribution in contributions]), order)
        return add_to_rows(features, seeds.rows, _align_rows(self.alpha, joined) * joined)


def gather_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]`` along axis 0, with the memory layout of ``tensor``.

    Hosts and seeds keep narrow features channel-major, whatever the order of the axes; a plain gather would undo that.
    """
    order = _memory_order(tensor)
    return _undo_permute(tensor.permute(order).index_select(0, rows), order)


def add_to_rows(tensor: Tensor, rows: Tensor, addends: Tensor) -> Tensor:
    """``tensor`` with ``addends`` ``[r, ...]`` added at ``rows``, with the memory layout of ``tensor``."""
    order = _memory_order(tensor)
    # Under autocast some blueprints compute in float32; the host expects its own dtype.
    return _undo_permute(tensor.permute(order).index_add(0, rows, addends.permute(order).to(tensor.dtype)), order)


def add_to_rows_in_place(tensor: Tensor, rows: Tensor, addends: Tensor) -> None:
    """Add ``addends`` ``[r, ...]`` to ``tensor`` at ``rows``."""
    order = _memory_order(tensor)
    tensor.permute(order).index_add_(0, rows, addends.permute(order).to(tensor.dtype))


def append_branches(batch: Tensor, parents: Sequence[int], examples: int) -> Tensor:
    """A copy of ``batch`` with copies of its blocks ``parents``, of ``examples`` each, appended along axis 1."""
    order = _memory_order(batch)
    axis, permuted = order.index(1), batch.permute(order)
    branches = [permuted.narrow(axis, parent * examples, examples) for parent in parents]
    return _undo_permute(torch.cat([permuted, *branches], dim=axis), order)


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes in order of decreasing stride, with axis 0 first."""
    return [0, *sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))]


def _undo_permute(permuted: Tensor, order: list[int]) -> Tensor:
    return permuted.permute([order.index(axis) for axis in range(len(order))])


def _align_rows(by_row: Tensor, tensor: Tensor) -> Tensor:
    """Reshape ``[r]`` to ``[r, 1, ...]``, for broadcasting over ``tensor``."""
    return by_row.view(-1, *[1] * (tensor.dim() - 1))


@dataclass(frozen=True)
class ActiveSeeds:
    """The seeds that take part in a pass, their alphas, and which of them learn; all arrays ``[E, S]``."""

    slots: Bools
    alpha: Float32s
    learning: Bools | None = None
    """Seeds that learn; None: all that take part."""


def select_blended(population: Population) -> ActiveSeeds:
    """The networks as they are: every blended seed at its alpha."""
    return ActiveSeeds(population.table.blended, population.table.alpha)


def select_committed(population: Population) -> ActiveSeeds:
    """The networks that would remain if the episode ended at this step: hosts and fossils."""
    return ActiveSeeds(population.table.stage == Stage.FOSSILIZED, population.table.alpha)


def select_isolated(population: Population) -> ActiveSeeds | None:
    """The networks with their isolated seeds at full alpha, where only these seeds learn; None if there are none."""
    training = population.table.stage == Stage.TRAINING
    if population.config.rules.isolation is not Isolation.SHADOW or not training.any():
        return None
    alpha = np.where(training, np.float32(1), population.table.alpha)
    return ActiveSeeds(population.table.blended | training, alpha, training)


MakeSlotOp = Callable[[int, range], SlotOp | None]
"""Makes the slot op of a slot for a range of networks, the first of which is row 0 of the pass; None: no operation."""


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of some networks."""

    networks: slice
    run: Callable[[Tensor, Parameters], Tensor]
    """Computes outputs ``[e, N', ...]`` from inputs ``[e, N, ...]`` and all hosts' parameters ``[E, *shape]``."""


def run_passes(passes: Sequence[ForwardPass], inputs: Tensor, host: Parameters) -> Tensor:
    """Outputs ``[E, N', ...]`` of all networks from inputs ``[E, N, ...]`` and hosts' parameters ``[E, *shape]``."""
    if len(passes) == 1:
        return passes[0].run(inputs, host)
    return torch.cat([part.run(inputs[part.networks], host) for part in passes])


def forward(population: Population, active: ActiveSeeds, inputs: Tensor) -> Tensor:
    """Outputs ``[E, N, ...]`` on ``inputs`` ``[E, N, ...]``."""
    return run_passes(prepare_forward(population, active), inputs, population.host.parameters)


def prepare_forward(
    population: Population,
    active: ActiveSeeds,
    generators: Sequence[torch.Generator] = (),
    banks: Mapping[SeedKind, SeedBank] | None = None,
) -> list[ForwardPass]:
    """The passes of all networks with these seeds. If not all of them learn, the hosts' buffers stay unchanged.

    In training mode, hosts that draw random numbers (`Execution.draws`) need ``generators``, one per network. The seeds
    are in ``banks``; None: in those of the population.
    """
    make_slot_op, keep_buffers = prepare_slot_op(population, active, banks), active.learning is not None
    return build_passes(population, make_slot_op, keep_buffers=keep_buffers, generators=generators)


def prepare_slot_op(
    population: Population, active: ActiveSeeds, banks: Mapping[SeedKind, SeedBank] | None = None
) -> MakeSlotOp:
    """The slot ops of a pass with these seeds; ``banks`` as in `prepare_forward`."""

    def make_slot_op(slot: int, networks: range) -> SlotOp | None:
        seeds = find_slot_seeds(population, active, slot, networks, banks)
        if seeds is None:
            return None
        alpha = torch.from_numpy(active.alpha[seeds.owners, slot]).to(population.host.values, non_blocking=True)
        return BlendOp(seeds, alpha)

    return make_slot_op


def find_slot_seeds(
    population: Population,
    active: ActiveSeeds,
    slot: int,
    networks: range,
    banks: Mapping[SeedKind, SeedBank] | None = None,
) -> SlotSeeds | None:
    """The slot's seeds in a pass of these networks; None if there are none. ``banks`` as in `prepare_forward`."""
    device = population.config.device
    slices: list[BankSlice] = []
    for kind, bank in (population.banks if banks is None else banks).items():
        if kind.slot != slot:
            continue
        owners = bank.block.owners.numpy()
        rows = (active.slots[owners, slot] & (owners >= networks.start) & (owners < networks.stop)).nonzero()[0]
        if not len(rows):
            continue
        # If the whole bank takes part, no rows need to be selected.
        index = None if len(rows) == len(bank) else torch.from_numpy(rows).to(device, non_blocking=True)
        owners, learning = owners[rows], None
        if active.learning is not None:
            learning = torch.from_numpy(active.learning[owners, slot]).to(device, non_blocking=True)
        slices.append(BankSlice(bank, owners, index, learning))
    if not slices:
        return None
    owners = np.concatenate([part.owners for part in slices])
    return SlotSeeds(slices, torch.from_numpy(owners - networks.start).to(device, non_blocking=True))


def build_passes(
    population: Population,
    make_slot_op: MakeSlotOp,
    *,
    keep_buffers: bool = False,
    generators: Sequence[torch.Generator] = (),
) -> list[ForwardPass]:
    """The passes with these slot ops, as many as the config's limit requires, valid until the next decision.

    With ``keep_buffers``, the hosts' buffers stay unchanged.
    """
    size, limit = population.size, population.config.networks_per_pass or population.size
    spans = [range(first, min(first + limit, size)) for first in range(0, size, limit)]
    return [
        _build_pass(population, make_slot_op, networks, keep_buffers, generators[networks.start : networks.stop])
        for networks in spans
    ]


def _build_pass(
    population: Population,
    make_slot_op: MakeSlotOp,
    networks: range,
    keep_buffers: bool,
    generators: Sequence[torch.Generator],
) -> ForwardPass:
    execution, slots = population.execution, range(population.table.slots)
    rows, all_networks = slice(networks.start, networks.stop), len(networks) == population.size
    # Views, so that running statistics are written into the population's own buffers.
    views = {name: buffer[rows] for name, buffer in population.host.buffers.items()}

    def select_rows(host: Parameters) -> Parameters:
        return host if all_networks else {name: stacked[rows] for name, stacked in host.items()}

    def get_buffers() -> Parameters:
        return {name: view.clone() for name, view in views.items()} if keep_buffers else views

    # Slot ops are made once for all batches, because the rows that they gather change only with decisions.
    stacked, config = population.strategy == "stacked", population.config
    ops = [make_slot_op(slot, networks) for slot in slots] if stacked else []
    by_network = [
        [make_slot_op(slot, range(network, network + 1)) for slot in slots] for network in networks if not stacked
    ]
    precision = partial(torch.autocast, config.device.type, torch.bfloat16) if config.bf16 else nullcontext

    def run(inputs: Tensor, host: Parameters) -> Tensor:
        with precision():
            if stacked:
                outputs = execution.run_stacked(select_rows(host), get_buffers(), inputs, ops)
            else:
                outputs = execution.run_looped(select_rows(host), get_buffers(), inputs, by_network, generators)
        # Losses and their gradients are computed in the population's own dtype.
        return outputs.to(config.dtype)

    return ForwardPass(rows, run)


ROUNDS = 3


def find_fastest_strategy(population: Population, inputs: Tensor) -> Strategy:
    """The strategy with the smaller median time for a forward and a backward pass on ``inputs`` ``[E, N, ...]``.

    They are timed in turns, after one warm-up round. The choice changes results only by rounding; a run that must be
    exactly reproducible should name its strategy instead.
    """
    if population.execution.needs_loop:
        return "looped"
    configured = population.strategy
    seconds: dict[Strategy, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(1 + ROUNDS):
        for strategy in STRATEGIES:
            population.strategy = strategy
            seconds[strategy].append(_time_pass(population, inputs))
    population.strategy = configured
    return min(STRATEGIES, key=lambda strategy: median(seconds[strategy][1:]))


def _time_pass(population: Population, inputs: Tensor) -> float:
    # A CUDA device computes asynchronously: wait for it before and after.
    on_cuda = inputs.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(inputs.device)
    start = time.perf_counter()
    # Running statistics must stay unchanged.
    passes = build_passes(population, prepare_slot_op(population, select_blended(population)), keep_buffers=True)
    total = run_passes(passes, inputs, population.host.parameters).square().sum()
    torch.autograd.grad(total, list(population.host.parameters.values()))
    if on_cuda:
        torch.cuda.synchronize(inputs.device)
    return time.perf_counter() - start
