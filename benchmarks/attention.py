"""The two formulas of `attention` seeds: `scaled_dot_product_attention`, and sums of products with the batch last.

    python benchmarks/attention.py [--seeds 1 9] [--tokens 8 16 64 128] [--width 64] [--rounds 7]

Forward and backward pass of what lies between the linear maps, 32 examples, one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from esper.growth.blueprints.mixing import KEY, attend_by_example, attend_by_products
from esper.train.workers import prepare_process

EXAMPLES = 32
FORMULAS = (attend_by_example, attend_by_products)


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 64, 128])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    prepare_process()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for seeds in asked.seeds:
        for tokens in asked.tokens:
            parts = [
                torch.randn(seeds, width, tokens, EXAMPLES, generator=generator).requires_grad_()
                for width in (KEY, KEY, asked.width)
            ]

            def learn(formula: Callable[..., torch.Tensor]) -> None:
                torch.autograd.grad(formula(*parts, causal=False).sum(), parts)  # noqa: B023

            both = [[milliseconds(lambda one=one: learn(one)) for one in FORMULAS] for _ in range(1 + asked.rounds)]
            fused, products = (median(column) for column in zip(*both[1:], strict=True))
            speed = median(slow / fast for fast, slow in both[1:])
            sys.stdout.write(
                f"{seeds} seeds, {tokens} tokens of {asked.width}: {fused:.2f} ms by example, {products:.2f} ms by "
                f"products: {speed:.2f} times as fast by example\n"
            )


if __name__ == "__main__":
    main()
