"""Networks of several sizes, alone or by a ladder, and their results as JSON lines: what `ladder_vit.py` and
`ladder_recipes.py` share. A size alone is a ladder of one rung."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from result_files import ResultFile
from rich.console import Console
from safetensors.torch import load_file
from tiny_gpt import Stream
from torch import Tensor, nn

import esper
from esper.dash.output import print_line

DEPTHS, DECAY = (1, 2, 4, 8), 0.2
ALONE = 0.0
"""The share of a network that was trained by itself."""


@dataclass(frozen=True)
class Family:
    """Networks that differ in depth, and how they learn."""

    name: str
    build: Callable[[int], nn.Module]
    """By depth; its blocks are in one list."""
    minibatches: Callable[[int], Stream]
    """By seed."""
    compute_loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    measure: Callable[[nn.Module], tuple[float, float]]
    """Validation loss, by which settings are chosen, and what is reported of the test data."""
    steps: int
    rate: float
    weight_decay: float = 0.1
    device: str = "cpu"


@dataclass(frozen=True)
class Result:
    """Of one network."""

    family: str
    depth: int
    share: float
    """Of the steps that a ladder spends at each depth but the first; 0 of a network alone."""
    rate: float
    seed: int
    validation: float
    test: float
    flops: float
    """Of its own training; of a ladder, of all up to here."""


@dataclass(frozen=True)
class Training:
    """A network alone, or a ladder of several."""

    family: Family
    depths: tuple[int, ...]
    share: float
    seed: int

    def __repr__(self) -> str:
        family = self.family
        return f"{family.name}, steps {family.steps}, rate {family.rate}, {self.depths}, {self.share}, {self.seed}"


class Results(ResultFile[Result]):
    """All that is known, in a file to which results are added."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        super().__init__(path, Result, device)

    def find(self, family: str, depth: int, share: float, rate: float, seed: int) -> Result | None:
        """The result, if it is known."""
        key = (family, depth, share, rate, seed)
        return next(
            (one for one in self.results if (one.family, one.depth, one.share, one.rate, one.seed) == key), None
        )

    def train(self, trainings: Sequence[Training]) -> None:
        """Train what is missing, the deepest first, beside other processes that do the same."""
        ordered = sorted(trainings, key=lambda one: -sum(one.depths))
        self.run_missing(ordered, self._knows, self._train_one)

    def _knows(self, one: Training) -> bool:
        family = one.family
        return all(self.find(family.name, depth, one.share, family.rate, one.seed) for depth in one.depths)

    def _train_one(self, one: Training) -> None:
        family = one.family
        name = f"{family.name}-{family.rate:g}-{one.depths[0]}-{one.share:g}-{one.seed}"
        folder = self.path.with_suffix(f".{name}")
        self.add(*train_sizes(family, one.depths, one.share, one.seed, folder))
        shutil.rmtree(folder)
        print_line(Console(), f"{one}: done")


def train_sizes(family: Family, depths: Sequence[int], share: float, seed: int, folder: Path) -> list[Result]:
    """Networks of all depths, by one ladder."""
    torch.manual_seed(seed)
    network, minibatches = family.build(depths[0]).to(family.device), family.minibatches(seed)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=family.rate, betas=(0.9, 0.98), weight_decay=family.weight_decay
    )

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        family.compute_loss(model.train(), minibatches[step]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    made = esper.ladder(
        network,
        learn,
        depths=depths,
        steps=family.steps,
        share=share or DECAY,  # of one size there is no share
        decay=DECAY,
        optimizer=optimizer,
        example_input=minibatches[0][0],
        folder=folder,
    )
    results = list[Result]()
    for rung in made.rungs:
        plain = family.build(rung.depth).to(family.device)
        plain.load_state_dict(load_file(rung.path / "model.safetensors"))
        validation, test = family.measure(plain.eval())
        results.append(Result(family.name, rung.depth, share, family.rate, seed, validation, test, rung.flops))
    return results
