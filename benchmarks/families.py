"""Networks of several sizes, alone or by a ladder, and their results as JSON lines: what `ladder_vit.py` and
`ladder_recipes.py` share. A size alone is a ladder of one rung."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_gpt import Stream
from torch import Tensor, nn

import esper

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


class Results:
    """All that is known, in a file to which results are added."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = [Result(**json.loads(line)) for line in lines]

    def find(self, family: str, depth: int, share: float, rate: float, seed: int) -> Result | None:
        """The result, if it is known."""
        key = (family, depth, share, rate, seed)
        return next((one for one in self.known if (one.family, one.depth, one.share, one.rate, one.seed) == key), None)

    def add(self, family: Family, depths: Sequence[int], share: float, seed: int) -> None:
        """Train what is missing: one network alone, or a ladder of several."""
        if all(self.find(family.name, depth, share, family.rate, seed) for depth in depths):
            return
        found = train_sizes(family, depths, share, seed, self._path.with_suffix(f".{family.name}-{share:g}-{seed}"))
        with self._path.open("a") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in found)
        self.known.extend(found)


def train_sizes(family: Family, depths: Sequence[int], share: float, seed: int, folder: Path) -> list[Result]:
    """Networks of all depths, by one ladder."""
    torch.manual_seed(seed)
    network, minibatches = family.build(depths[0]), family.minibatches(seed)
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
        plain = family.build(rung.depth)
        plain.load_state_dict(load_file(rung.path / "model.safetensors"))
        validation, test = family.measure(plain.eval())
        results.append(Result(family.name, rung.depth, share, family.rate, seed, validation, test, rung.flops))
    shutil.rmtree(folder)
    return results
