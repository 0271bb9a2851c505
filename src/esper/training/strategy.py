"""Find out which way of running a cohort is faster here: as one stacked program, or network by network."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from esper.training.passes import as_is, forward
from esper.training.plan import STRATEGIES, Strategy
from esper.training.population import Population

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
