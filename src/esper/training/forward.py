"""Forward passes of a population."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.rules import Isolation
from esper.lifecycle.stages import Stage
from esper.training.execution import Graft, Parameters
from esper.training.parameters import Bank
from esper.training.population import STRATEGIES, Population, Strategy
from esper.training.slot_ops import BankCall, Blended, Estranged, SlotSeeds

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Participation:
    """The seeds in a pass: which slots, with what alpha, and whose parameters learn. All arrays ``[E, S]``."""

    slots: Bools
    alpha: Floats
    learning: Bools | None = None
    """None: all that take part."""
    estranged: Bools | None = None
    """Seeds whose output counts for their own gradient alone, and not for the features; None: there are none."""


def as_is(population: Population) -> Participation:
    """The networks as they are: every blended seed at its alpha."""
    return Participation(population.table.blended, population.table.alpha)


def as_trained(population: Population) -> Participation:
    """The networks as they are, and, with isolation by a straight-through estimator, the seeds that learn by it."""
    training = population.table.stage == Stage.TRAINING
    if population.plan.rules.isolation is not Isolation.STRAIGHT_THROUGH or not training.any():
        return as_is(population)
    return Participation(population.table.blended | training, population.table.alpha, estranged=training)


def committed(population: Population) -> Participation:
    """The networks that would remain if the episode ended now: hosts and fossils."""
    return Participation(population.table.stage == Stage.FOSSILIZED, population.table.alpha)


def shadow(population: Population) -> Participation | None:
    """The networks with their isolated seeds at full alpha, in which only those seeds learn; None without any."""
    training = population.table.stage == Stage.TRAINING
    if population.plan.rules.isolation is not Isolation.SHADOW or not training.any():
        return None
    alpha = np.where(training, np.float32(1), population.table.alpha)
    return Participation(population.table.blended | training, alpha, training)


Grafting = Callable[[int, range], Graft | None]
"""What a slot does to the features of these networks, seen as all there are; None: nothing."""


@dataclass(frozen=True)
class Pass:
    """The forward pass of some networks."""

    networks: slice
    run: Callable[[Tensor, Parameters], Tensor]
    """Their outputs ``[e, N', ...]`` from their inputs ``[e, N, ...]`` and all hosts' parameters ``[E, *shape]``."""


@dataclass(frozen=True)
class Program:
    """The forward pass of all networks, in as many passes as the plan's limit asks for.

    It holds for any number of batches, until the population's next decision.
    """

    passes: Sequence[Pass]

    def __call__(self, inputs: Tensor, host: Parameters) -> Tensor:
        """Outputs ``[E, N', ...]`` from inputs ``[E, N, ...]`` and the hosts' parameters ``[E, *shape]``."""
        if len(self.passes) == 1:
            return self.passes[0].run(inputs, host)
        return torch.cat([one.run(inputs[one.networks], host) for one in self.passes])


def prepared(population: Population, participation: Participation) -> Program:
    """The forward pass of the networks with these seeds; where not all of them learn it changes no host's buffers."""

    def graft(slot: int, networks: range) -> Graft | None:
        seeds = slot_seeds(population, participation, slot, networks)
        if seeds is None:
            return None
        alpha = torch.from_numpy(participation.alpha[seeds.owners, slot]).to(population.host.values, non_blocking=True)
        if participation.estranged is None or not participation.estranged[seeds.owners, slot].any():
            return Blended(seeds, alpha)
        apart = torch.from_numpy(participation.estranged[seeds.owners, slot]).to(alpha.device, non_blocking=True)
        return Estranged(seeds, alpha, apart)

    return program(population, graft, aside=participation.learning is not None)


def forward(population: Population, participation: Participation, inputs: Tensor) -> Tensor:
    """Outputs ``[E, N, ...]`` on ``inputs`` ``[E, N, ...]``."""
    return prepared(population, participation)(inputs, population.host.parameters)


def slot_seeds(population: Population, participation: Participation, slot: int, networks: range) -> SlotSeeds | None:
    """The slot's seeds in a pass of these networks, if any."""
    calls: list[BankCall] = []
    for kind, bank in population.banks.items():
        if kind.slot != slot:
            continue
        owners = bank.block.owners.numpy()
        taking_part = participation.slots[owners, slot] & (owners >= networks.start) & (owners < networks.stop)
        rows = taking_part.nonzero()[0]
        if len(rows):
            calls.append(_bank_call(bank, rows, owners[rows], participation, slot))
    if not calls:
        return None
    owners = np.concatenate([call.owners for call in calls])
    return SlotSeeds(calls, torch.from_numpy(owners - networks.start).to(population.plan.device, non_blocking=True))


def _bank_call(
    bank: Bank, rows: NDArray[np.int64], owners: NDArray[np.int64], participation: Participation, slot: int
) -> BankCall:
    device = bank.block.values.device
    learning = None
    if participation.learning is not None:
        learning = torch.from_numpy(participation.learning[owners, slot]).to(device, non_blocking=True)
    chosen = None if len(rows) == len(bank) else torch.from_numpy(rows).to(device, non_blocking=True)
    return BankCall(bank, owners, chosen, learning)


def program(population: Population, graft: Grafting, *, aside: bool = False) -> Program:
    """The forward pass with what ``graft`` has for the slots; ``aside``, what it does to the hosts' buffers is lost."""
    size, limit = population.size, population.plan.networks_per_pass or population.size
    return Program(
        [_pass(population, graft, range(first, min(first + limit, size)), aside) for first in range(0, size, limit)]
    )


def _pass(population: Population, graft: Grafting, networks: range, aside: bool) -> Pass:
    execution, rows = population.execution, slice(networks.start, networks.stop)
    parts = {name: buffer[rows] for name, buffer in population.host_buffers.items()}
    slots = range(population.table.slots)

    def own(host: Parameters) -> Parameters:
        whole = len(networks) == population.size
        return host if whole else {name: stacked[rows] for name, stacked in host.items()}

    def buffers() -> Parameters:
        return {name: part.clone() for name, part in parts.items()} if aside else parts

    if population.strategy == "stacked":
        grafts = [graft(slot, networks) for slot in slots]
        return Pass(rows, lambda inputs, host: execution.stacked(own(host), buffers(), inputs, grafts))
    alone = [[graft(slot, range(network, network + 1)) for slot in slots] for network in networks]
    return Pass(rows, lambda inputs, host: execution.looped(own(host), buffers(), inputs, alone))


ROUNDS = 3


def fastest_strategy(population: Population, inputs: Tensor) -> Strategy:
    """The strategy with the smaller median time for a forward and a backward pass on ``inputs`` ``[E, N, ...]``.

    Strategies take turns, after one round that does not count. Results do not depend on the choice but for rounding;
    a run that must repeat itself exactly names its strategy instead.
    """
    chosen = population.strategy
    seconds: dict[Strategy, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(1 + ROUNDS):
        for strategy in STRATEGIES:
            population.strategy = strategy
            seconds[strategy].append(_timed(population, inputs))
    population.strategy = chosen
    return min(STRATEGIES, key=lambda strategy: median(seconds[strategy][1:]))


def _timed(population: Population, inputs: Tensor) -> float:
    _finish(inputs.device)
    began = time.perf_counter()
    total = forward(population, as_is(population), inputs).square().sum()
    torch.autograd.grad(total, list(population.host.parameters.values()))
    _finish(inputs.device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    """Wait for what a device does behind the program's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
