"""What measuring seeds costs an ordinary model, in validation passes: shared passes beside separate ones.

    python benchmarks/shared_passes.py [--rounds 15] [--minibatches 4] [--only resnet]

Every slot holds a seed, and each is switched off in turn. Separate passes are one for the model as it is and one per
seed. Both kinds take turns in one run, in one thread; figures are medians of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.hosts import Block, TransformerBlock

import esper
from esper.grower.passes import Passes
from esper.growth.model import GrowingModel
from esper.train.workers import prepare_process

CLASSES = 10
DEPTH = 8
PLACES = (1, 3, 5)
"""Blocks behind which there is a slot."""


class Stack(nn.Module):
    """Blocks of one kind, one after the other."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, classes]``."""
        features = self.blocks(self.stem(inputs))
        return self.head(features.mean((2, 3) if features.dim() == 4 else 1))


@dataclass(frozen=True)
class Case:
    """A host, what grows behind its blocks, and what it reads."""

    make: Callable[[], nn.Module]
    blueprint: str
    shape: tuple[int, ...]


CASES = {
    "resnet": Case(
        lambda: Stack(nn.Conv2d(3, 16, 3, padding=1), lambda: Block(16, 16, 1), 16), "conv3x3", (64, 3, 16, 16)
    ),
    "transformer": Case(lambda: Stack(nn.Linear(16, 64), lambda: TransformerBlock(64, 4), 64), "mlp", (64, 32, 16)),
}


def grown(case: Case) -> GrowingModel:
    """With a seed that counts in every slot."""
    torch.manual_seed(0)
    names = [f"blocks.{place}" for place in PLACES]
    model = esper.attach(case.make(), names, torch.randn(2, *case.shape[1:]))
    for name in names:
        seed = model.slots[name].germinate(case.blueprint, torch.Generator().manual_seed(1), alpha=1.0)
        with torch.no_grad():
            for parameter in seed.parameters():
                parameter.add_(torch.randn(parameter.shape) / 10)
    return model


def measure(case: Case, rounds: int, minibatches: int) -> str:
    """Both kinds of passes, in turns."""
    model = grown(case)
    data = list(torch.randn(minibatches, *case.shape))
    labels = torch.randint(CLASSES, (case.shape[0],))

    @torch.inference_mode()
    def evaluate(model: GrowingModel) -> float:
        model.eval()
        return sum(float(F.cross_entropy(model(inputs), labels)) for inputs in data)

    changes = dict.fromkeys(model.slots, 0.0)
    shared, separate = Passes(model), Passes(model)
    separate.separate = "asked for"
    if shared.measure(evaluate, changes) != separate.measure(evaluate, changes) or shared.separate is not None:
        raise SystemExit(f"passes were not shared: {shared.separate}")
    ways: dict[str, Callable[[], object]] = {
        "one": lambda: evaluate(model),
        "separate": lambda: separate.measure(evaluate, changes),
        "shared": lambda: shared.measure(evaluate, changes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    one, apart, together = (median(seconds[name]) for name in ways)
    return (
        f"{len(changes)} seeds: a validation {1e3 * one:.0f} ms, separate {apart / one:.2f} passes, "
        f"shared {together / one:.2f}, {1 - together / apart:.0%} saved"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    asked = parser.parse_args()
    prepare_process()
    for name in asked.only:
        sys.stdout.write(f"{name}, {measure(CASES[name], asked.rounds, asked.minibatches)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
