"""Does growth pay on ordinary hosts? Bare, with everything from the start, grown by two rules.

The bare host is trained twice: for as many epochs as the grown ones, and for as many more as the rule that looks spent
more FLOPs.

`python benchmarks/practice.py FOLDER --seeds 0 1 2 3 4` trains every host/task pair in each of these ways, prints a
table of means over seeds, and writes all runs' results to FOLDER/practice.json. Stopped, it goes on: runs that are done
are only read. It computes in one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from zoo.data import Minibatch, Splits, load
from zoo.hosts import HOSTS
from zoo.training import (
    ORDER,
    build_model,
    cross_entropy,
    make_optimizer,
    measure,
    numpy_generator,
    plant_largest,
    train_epoch,
)

import esper
from esper.control.rules import Never
from esper.dash.output import print_line
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError, EsperError, TaskError
from esper.files import write_atomically
from esper.growth.slot import Slot
from esper.lifecycle.rules import Rules
from esper.train.workers import prepare_process

ALL_FROM_START = "all_from_start"
"""Instead of a controller: every slot is filled for good before the first step, with its largest blueprint."""
ARMS = {
    "bare host": "none",
    "everything from the start": ALL_FROM_START,
    "grown by the heuristic": "heuristic",
    "grown by the rule that looks": "look",
}
"""Controllers by what they are called in the table."""
LONGER = "bare host, as many FLOPs"
"""How the table calls the host by itself, trained for the FLOPs that the rule that looks took."""
PAIRS = (("fashion-mnist", "resnet"), ("digits", "vit"), ("charlm", "gpt"), ("mnist1d", "conv1d"))
INSTEAD = {"fashion-mnist": "digits"}
"""What to learn where a data set is not on this machine."""
TABLE_WIDTH = 120


@dataclass(frozen=True)
class Result:
    """One training; loss, accuracy and score are of the host with its fossils on test data."""

    task: str
    host: str
    controller: str
    seed: int
    epochs: int
    loss: float
    """Mean cross-entropy in nats."""
    accuracy: float
    """Fraction that is right, in [0, 1]."""
    host_parameters: int
    added_parameters: int
    training_flops: int
    """For host, seeds and forks, three forward passes for every example learned from; measurements are not counted."""
    learning_seconds: float
    """Spent on the epochs alone."""
    seconds: float
    """Spent on these, measurements on validation data and decisions."""


_RESULT, _RESULTS = TypeAdapter(Result), TypeAdapter(list[Result])


@dataclass(frozen=True)
class Pair:
    """A host with the data that it learns."""

    task: str
    host: str
    splits: Splits


def main(
    folder: tyro.conf.Positional[Path],
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    tasks: tuple[str, ...] = tuple(task for task, _ in PAIRS),
    epochs: int | None = None,
) -> None:
    """Train, compare, print.

    Args:
        folder: Keeps the results.
        seeds: One run per seed, pair and way.
        tasks: Which pairs, by task.
        epochs: Of every run; by default as suits the host.
    """
    prepare_process()
    console = Console()
    results: list[Result] = []
    for pair in _pairs(tasks):
        planned = HOSTS[pair.host].epochs if epochs is None else epochs

        def train(controller: str, seed: int, epochs: int, pair: Pair = pair) -> Result:
            return train_once(_path(folder, pair, controller, seed, epochs), pair, controller, seed, epochs)

        for seed in seeds:
            for controller in ARMS.values():
                results.append(train(controller, seed, planned))
                print_line(console, _line(results[-1]))
            bare, looked = (
                _find(results, pair, seed, ARMS[how]) for how in ("bare host", "grown by the rule that looks")
            )
            more = round(bare.epochs * looked.training_flops / bare.training_flops)
            results.append(replace(train(bare.controller, seed, more), controller=LONGER))
            print_line(console, _line(results[-1]))
    write_atomically(folder / "practice.json", _RESULTS.dump_json(results, indent=2))
    Console(width=TABLE_WIDTH).print(_table(results))


def _pairs(tasks: Sequence[str]) -> list[Pair]:
    unknown = set(tasks) - {task for task, _ in PAIRS}
    if unknown:
        raise ConfigError(f"no pair has task {min(unknown)!r}: choose from {', '.join(task for task, _ in PAIRS)}")
    return [_pair(task, host) for task, host in PAIRS if task in tasks]


def _pair(task: str, host: str) -> Pair:
    try:
        return Pair(task, host, load(task))
    except TaskError:
        if task not in INSTEAD:
            raise
        return _pair(INSTEAD[task], host)


def _path(folder: Path, pair: Pair, controller: str, seed: int, epochs: int) -> Path:
    return folder / f"{pair.task}-{pair.host}" / f"{controller}-seed{seed}-epochs{epochs}.json"


def _find(results: Sequence[Result], pair: Pair, seed: int, controller: str) -> Result:
    wanted = (pair.task, pair.host, controller, seed)
    return next(one for one in results if (one.task, one.host, one.controller, one.seed) == wanted)


def train_once(path: Path, pair: Pair, controller: str, seed: int, epochs: int, rules: Rules | None = None) -> Result:
    """The result that is kept at ``path``; it is made where there is none."""
    if path.exists():
        return _RESULT.validate_json(path.read_bytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    result = train_host(pair, controller, seed, epochs, rules)
    write_atomically(path, _RESULT.dump_json(result, indent=2))
    return result


def train_host(pair: Pair, controller: str, seed: int, epochs: int, rules: Rules | None = None) -> Result:
    """Train a host as `examples/grow.py` does, and count what that takes."""
    kind, splits = HOSTS[pair.host], pair.splits
    model = build_model(pair.host, splits, seed)
    if controller == ALL_FROM_START:
        plant_largest(model, seed)
    optimizer = make_optimizer(model, kind)

    def loss(batch: Minibatch) -> Tensor:
        return cross_entropy(model(batch.inputs), batch)

    grower = esper.Grower(
        model,
        optimizer,
        controller=Never.name if controller == ALL_FROM_START else controller,
        evaluate=lambda model: measure(model, splits.validation),
        classes=splits.classes,
        horizon=epochs,
        rules=rules,
        train_size=len(splits.train),
        seed=seed,
        loss=loss,
    )
    assert model.host_flops is not None, "torch can count the FLOPs of all of these hosts"
    flops, learning_seconds, began = 0, 0.0, time.perf_counter()
    learned = len(splits.train) // kind.batch_size * kind.batch_size  # minibatches are whole
    for epoch in range(1, epochs + 1):
        forward = model.host_flops + count_seed_flops(*model.slots.values())
        # Each fork goes without the seed of the slot that it is named by.
        forks = sum(forward - count_seed_flops(model.slots[name]) for name in grower.backend.forks.forks)
        flops += TRAINING_PASSES * learned * (forward + forks)
        epoch_began, order = time.perf_counter(), numpy_generator(seed, ORDER, epoch)
        trained = train_epoch(model, optimizer, splits.train, kind.batch_size, order, grower.isolated_backward)
        learning_seconds += time.perf_counter() - epoch_began
        grower.step(train_loss=trained.loss, train_accuracy=trained.accuracy)
    seconds = time.perf_counter() - began
    grower.finish()
    test = measure(model, splits.test)
    return Result(
        task=pair.task,
        host=pair.host,
        controller=controller,
        seed=seed,
        epochs=epochs,
        loss=test.loss,
        accuracy=test.accuracy,
        host_parameters=model.host_parameters,
        added_parameters=model.added_parameters,
        training_flops=flops,
        learning_seconds=learning_seconds,
        seconds=seconds,
    )


def count_seed_flops(*slots: Slot) -> int:
    """FLOPs of one forward pass for one example through the seeds that are in these slots, as blueprints count them."""
    return sum(0 if slot.seed is None else slot.seed.flops_at(slot.site) for slot in slots)


def _line(result: Result) -> str:
    return (
        f"{result.host} on {result.task}, {result.controller}, seed {result.seed}: accuracy {result.accuracy:.4f}, "
        f"{result.host_parameters} + {result.added_parameters} parameters, {result.seconds:.1f} s"
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=None, header_style="underline")
    for name in ("host on task", "how", "accuracy", "loss", "parameters", "training GFLOP", "seconds", "learning"):
        table.add_column(name, justify="left" if name in ("host on task", "how") else "right", no_wrap=True)
    for task, host in dict.fromkeys((one.task, one.host) for one in results):
        for how, controller in (*ARMS.items(), (LONGER, LONGER)):
            runs = [one for one in results if (one.task, one.host, one.controller) == (task, host, controller)]
            table.add_row(
                f"{host} on {task}",
                how,
                _spread([100 * one.accuracy for one in runs], 1),
                _spread([one.loss for one in runs], 3),
                f"{statistics.mean(one.host_parameters + one.added_parameters for one in runs):,.0f}",
                f"{statistics.mean(one.training_flops for one in runs) / 1e9:,.1f}",
                f"{statistics.mean(one.seconds for one in runs):.1f}",
                f"{statistics.mean(one.learning_seconds for one in runs):.1f}",
            )
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
