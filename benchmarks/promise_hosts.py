"""Does promise foretell what planting brings to ordinary hosts? Every candidate is tried, from the same state on.

    python benchmarks/promise_hosts.py [--tasks mnist1d digits] [--seeds 0 1 2 3 4] [--stages .1 .5]

A host learns alone for a share of its epochs, and is looked at (128 training examples, in evaluation mode). Then it
trains on to the end in as many copies as there are candidates, and one without any, all with the same minibatches; each
copy has one candidate planted for good. Its gain is the test loss of the copy without less its own.

The first columns are rank correlations with the gain over a host's candidates, mean over seeds: of promise, of held-out
promise, and of the number of parameters; "of means" is that of the mean promise with the mean gain. The last ones are
gains: of what was promised most, of all candidates in the mean, and of the best in hindsight.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from zoo.data import Splits, load
from zoo.hosts import HOSTS as KINDS
from zoo.training import ORDER, SEEDS, build_model, example_losses, measure, numpy_generator, train_epoch

from esper.growth.model import GrowingModel
from esper.lifecycle.rules import Rules
from esper.numerics.random_streams import module_generator
from esper.train.workers import prepare_process

HOSTS = {"mnist1d": "conv1d", "digits": "vit"}
"""By task."""
EXAMPLES = 128
Floats = NDArray[np.float64]


@dataclass
class Training:
    """A host under way: what a copy takes along."""

    host: str
    seed: int
    model: GrowingModel
    optimizer: torch.optim.Optimizer
    epochs: int = 0

    def train_until(self, epochs: int, splits: Splits) -> None:
        """Minibatches follow from the seed and the number of the epoch."""
        while self.epochs < epochs:
            self.epochs += 1
            rng = numpy_generator(self.seed, ORDER, self.epochs)
            train_epoch(self.model, self.optimizer, splits.train, KINDS[self.host].batch_size, rng)

    def plant(self, slot: str, blueprint: str) -> None:
        """For good, at full alpha: a newborn changes nothing yet."""
        place = self.model.slots[slot]
        generator = module_generator(self.seed, SEEDS, list(self.model.slots).index(slot))
        place.germinate(blueprint, generator, blend=min(Rules().blends), alpha=1.0)
        place.fossilize()
        self.optimizer.add_param_group({"params": list(place.parameters())})


class Found(NamedTuple):
    """Of all candidates of one host, in one order."""

    promise: Floats
    held_out: Floats
    size: Floats
    """Parameters."""
    gain: Floats
    """Nats of test loss."""


def begin(host: str, seed: int, splits: Splits) -> Training:
    """A fresh host."""
    kind, model = KINDS[host], build_model(host, splits, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.learning_rate, weight_decay=kind.weight_decay)
    return Training(host, seed, model, optimizer)


def try_all(host: str, seed: int, splits: Splits, stage: float) -> Found:
    """Look after that share of the epochs, and then plant everything."""
    kind, training = KINDS[host], begin(host, seed, splits)
    training.train_until(round(stage * kind.epochs), splits)
    batches = splits.train.in_order(kind.batch_size)
    rows = training.model.look(example_losses, batches, examples=EXAMPLES, draws=1, seed=seed).rows
    rows = sorted(rows, key=lambda row: (row.slot, row.blueprint))
    losses: list[float] = []
    for row in (None, *rows):
        one = copy.deepcopy(training)
        if row is not None:
            one.plant(row.slot, row.blueprint)
        one.train_until(kind.epochs, splits)
        losses.append(measure(one.model, splits.test).loss)
    gains = losses[0] - np.array(losses[1:])
    told = ([row.promise for row in rows], [row.promise_held_out for row in rows], [row.parameters for row in rows])
    return Found(*map(np.array, told), gains)


def rank(promises: Floats, gains: Floats) -> float:
    """Spearman's correlation."""
    return float(spearmanr(promises, gains).statistic)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard error, if there are several."""
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def main(
    tasks: tuple[str, ...] = tuple(HOSTS),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    stages: tuple[float, ...] = (0.1, 0.5),
) -> None:
    """Print the table; ± is a standard error over seeds, and gains are in nats of test loss."""
    prepare_process()
    columns = ("promise", "held out", "size alone", "of means", "picked", "mean", "best")
    table = Table("host on task", "looked after", *columns)
    for task in tasks:
        splits = load(task)
        for stage in stages:
            found = [try_all(HOSTS[task], seed, splits, stage) for seed in seeds]
            means = Found(*(np.mean(values, 0) for values in zip(*found, strict=True)))
            table.add_row(
                f"{HOSTS[task]} on {task}",
                f"{stage:.0%}",
                spread([rank(one.promise, one.gain) for one in found]),
                spread([rank(one.held_out, one.gain) for one in found]),
                spread([rank(one.size, one.gain) for one in found]),
                f"{rank(means.promise, means.gain):.2f}",
                spread([float(one.gain[one.promise.argmax()]) for one in found], 3),
                spread([float(one.gain.mean()) for one in found], 3),
                spread([float(one.gain.max()) for one in found], 3),
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    tyro.cli(main)
