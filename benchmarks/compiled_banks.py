"""Whether `torch.compile` makes a bank of seeds faster: forward and backward pass, as they are and compiled.

    python benchmarks/compiled_banks.py [--seeds 9] [--examples 32] [--rounds 7]

One bank for each blueprint of the token suite, in the second slot, on one core. Compiled with dynamic shapes, as the
number of seeds changes with every decision; it needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor
from torch.func import functional_call

from esper.growth.blueprints.registry import get
from esper.population.execution import Execution, make_stacked_call
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process

SUITE = get_suite("tokens")
CALLS = 50


def milliseconds(work: Callable[[], object]) -> float:
    """Of one of many calls."""
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return 1e3 * (time.perf_counter() - began) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    prepare_process()
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(2, *SUITE.input_shape, generator=generator)
    site = Execution(SUITE.template(), SUITE.sites, example).sites[1]
    shape = (asked.seeds, site.width, site.positions, asked.examples)
    features = torch.randn(shape, generator=generator).transpose(1, 3).requires_grad_()
    read = (asked.seeds, SUITE.input_shape[1], SUITE.input_shape[0], asked.examples)
    inputs = torch.randn(read, generator=generator).transpose(1, 3)
    for name in SUITE.blueprints:
        module = get(name)(site, generator)
        parameters = {
            key: torch.randn(asked.seeds, *value.shape, generator=generator).requires_grad_()
            for key, value in module.named_parameters()
        }
        buffers = {key: value.expand(asked.seeds, *value.shape) for key, value in module.named_buffers()}
        plain = make_stacked_call(module)

        def learn(call: Callable[..., Tensor], own: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
            output = call(own, held, features, inputs)
            torch.autograd.grad(output.sum(), [*own.values(), features], allow_unused=True)

        def one_call(own: Mapping[str, Tensor], held: Mapping[str, Tensor], *given: Tensor) -> Tensor:
            return functional_call(module, (dict(own), dict(held)), given)  # noqa: B023

        torch.compiler.reset()
        compiled = torch.compile(one_call, dynamic=True)
        began = time.perf_counter()
        learn(compiled, parameters, buffers)
        spent = time.perf_counter() - began
        both: list[tuple[float, float]] = []
        for _ in range(1 + asked.rounds):
            calls = (plain, compiled)
            first, second = (milliseconds(lambda one=one: learn(one, parameters, buffers)) for one in calls)  # noqa: B023
            both.append((first, second))
        ours, theirs = (median(column) for column in zip(*both[1:], strict=True))
        speed = median(one / other for one, other in both[1:])
        sys.stdout.write(
            f"{name:12} {ours:.2f} ms, compiled {theirs:.2f} ms: {speed:.2f} times as fast; compiling {spent:.0f} s\n"
        )


if __name__ == "__main__":
    main()
