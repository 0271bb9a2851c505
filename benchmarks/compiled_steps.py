"""Whether `torch.compile` makes a population's training step faster, decision after decision.

    python benchmarks/compiled_steps.py [--suite tokens] [--networks 32] [--decisions 6] [--rounds 7]

A step is the forward and backward pass of all hosts and seeds on one minibatch per network. Seeds come and go with
decisions, by a controller that chooses uniformly, so that compiled code is compiled anew. Both ways take turns, on one
core; compiling needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor

from esper.control.rules import Uniform
from esper.lifecycle.rules import Rules
from esper.population.forward import prepare_forward, select_blended
from esper.population.learning import compute_losses
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process

CALLS = 10


def milliseconds(work: Callable[[], object]) -> float:
    """Of one of many calls."""
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return 1e3 * (time.perf_counter() - began) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", default="tokens")
    parser.add_argument("--networks", type=int, default=32)
    parser.add_argument("--decisions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    prepare_process()
    suite = get_suite(asked.suite)
    instances = suite.sample(asked.networks, "train", np.random.default_rng(0))
    episodes = Episodes(suite, instances, Rules())
    population, controller = episodes.population, Uniform()
    state = controller.start([instance.seed for instance in instances])
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(asked.networks, suite.batch_size, *suite.input_shape, generator=generator)
    labels = torch.randint(suite.classes, inputs.shape[:2], generator=generator)

    for decision in range(1, asked.decisions + 1):
        actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
        episodes.step(actions)
        population.execution.train(True)
        run, host = prepare_forward(population, select_blended(population))[0].run, population.host.parameters
        leaves = [leaf for block in population.flat.blocks for leaf in block.parameters.values()]

        def compute_total(inputs: Tensor, labels: Tensor) -> Tensor:
            return compute_losses(run(inputs, host), labels).sum()  # noqa: B023

        def learn(total: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(total(inputs, labels), leaves, allow_unused=True, materialize_grads=True)  # noqa: B023

        began = time.perf_counter()
        learn(compute_total)
        write(f"decision {decision}, {len(population.banks)} banks: a first step {time.perf_counter() - began:.2f} s")
        compiled = torch.compile(compute_total, dynamic=True)
        began = time.perf_counter()
        found = learn(compiled)
        spent = time.perf_counter() - began
        write(f", compiled {spent:.0f} s")
        for one, other in zip(found, learn(compute_total), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        turns = [
            (milliseconds(lambda: learn(compute_total)), milliseconds(lambda: learn(compiled)))  # noqa: B023
            for _ in range(asked.rounds)
        ]
        plain, fast = (median(column) for column in zip(*turns, strict=True))
        speed = median(one / other for one, other in turns)
        steps = "never" if fast >= plain else f"after {1e3 * spent / (plain - fast):,.0f} steps"
        write(
            f"; then {plain:.1f} ms, compiled {fast:.1f} ms: {speed:.2f} times as fast; compiling is repaid {steps}, "
            f"and a decision has {suite.batches_per_step}\n"
        )


def write(text: str) -> None:
    """Print at once: compiling takes long."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
