"""What tells whether a seed is worth keeping? Measures a grower could take, against what the seed brings in the end.

    python benchmarks/worth.py FOLDER [--seeds 0 1 2 3 4]

Every host is trained for a while; then one seed is planted, in every case another, and judged after its probation. Its
*gain* is what the network with it has on test data in the end, less what its *bare twin* has: the same network, never
grown, on the same minibatches for as long. Four measures on validation data predict the gain:

- dependence: with the seed less with the seed switched off (leave-one-out);
- progress: with the seed less the network's own state when it was planted;
- refit: with the seed less with it removed, both trained for `REFIT` more epochs;
- twin: with the seed less the bare twin at that moment.

Stopped, it goes on: pairs of host and seed that are done are only read. It computes in one thread.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from zoo.data import Labelled, Minibatch, Splits, Windows, load
from zoo.hosts import HOSTS as KINDS
from zoo.training import Score, cross_entropy, measure

import esper
from esper.errors import EsperError
from esper.files import write_atomically
from esper.growth.model import GrowingModel
from esper.numerics.random_streams import child_generator
from esper.train.workers import prepare_process

BEFORE, RAMP, TRIAL, REFIT, AFTER = 8, 3, 6, 2, 12
"""Epochs until a seed is planted, of its ramp, of its probation, of refitting without it, and from its judgement on."""
JUDGED = BEFORE + RAMP + TRIAL
LONGEST_EPOCH = 60
"""Minibatches."""
MEASURES = ("dependence", "progress", "refit", "twin")
PRICES = (0.0, 0.02, 0.05)
"""What a seed costs, in the unit of its gain: whose measure exceeds it is kept, and brings its gain less the price."""
CONTEXT = 4
"""Characters that the language model reads."""


class TiedCharacters(nn.Module):
    """Indices ``[B, T]`` to logits ``[B, T, classes]``; what embeds the characters also tells them."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.layer1 = nn.Sequential(nn.Linear(CONTEXT * width, width), nn.ReLU())
        self.layer2 = nn.Linear(width, width)

    def forward(self, indices: Tensor) -> Tensor:
        tokens = nn.functional.pad(self.characters(indices), (0, 0, CONTEXT - 1, 0))
        length = indices.shape[1]
        window = torch.cat([tokens[:, back : back + length] for back in range(CONTEXT)], dim=2)
        return self.layer2(self.layer1(window)) @ self.characters.weight.T


class WeightNormed(nn.Module):
    """Signals ``[B, 1, L]`` through two layers, whose weights have lengths and directions, to logits."""

    def __init__(self, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(weight_norm(nn.Linear(features, width)), nn.ReLU())
        self.layer2 = nn.Sequential(weight_norm(nn.Linear(width, width)), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(inputs.flatten(1))))


Build = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Host:
    """A network, its task, and the seeds that are planted in it, each in a case of its own."""

    task: str
    build: Build
    learning_rate: float
    cases: tuple[tuple[str, str], ...]
    """Slot and blueprint."""


def _practice(name: str) -> Build:
    return lambda shape, classes: KINDS[name].build(shape, classes, torch.default_generator)


HOSTS = {
    "mlp": Host(
        "digits",
        _practice("mlp"),
        3e-3,
        (("layer1", "lowrank"), ("layer1", "mlp"), ("layer2", "mlp"), ("layer2", "mlp_wide")),
    ),
    "conv1d": Host(
        "mnist1d",
        _practice("conv1d"),
        5e-3,
        (("layer1", "conv3x3"), ("layer2", "depthwise"), ("layer2", "conv3x3"), ("layer3", "conv3x3")),
    ),
    "vit": Host(
        "digits",
        _practice("vit"),
        2e-3,
        (("block1", "mlp"), ("block1", "attention"), ("block2", "attention"), ("block2", "token_conv")),
    ),
    "weight_norm": Host(
        "mnist1d",
        lambda shape, classes: WeightNormed(shape[-1], classes),
        3e-3,
        (("layer1", "lowrank"), ("layer1", "mlp"), ("layer2", "mlp"), ("layer2", "mlp_wide")),
    ),
    "tied": Host(
        "charlm",
        lambda _, classes: TiedCharacters(classes),
        3e-3,
        (("layer1", "mlp"), ("layer1", "mlp_wide"), ("layer2", "lowrank"), ("layer2", "mlp")),
    ),
}


@dataclass(frozen=True)
class Case:
    """One seed's probation: accuracies, and losses in nats with the sign turned, so that more is better."""

    slot: str
    blueprint: str
    measures: dict[str, tuple[float, float]]
    """By name: in accuracy, in loss."""
    gain: tuple[float, float]
    """On test data in the end, over the bare twin."""


class Training:
    """A network and its optimizer, which learn by epochs that are the same for all twins."""

    def __init__(self, host: Host, splits: Splits, seed: int) -> None:
        self._splits, self._seed, self._epochs = splits, seed, 0
        inputs = next(splits.train.in_order(2)).inputs
        torch.manual_seed(seed)
        offers = {slot: [kind for place, kind in host.cases if place == slot] for slot, _ in host.cases}
        built = host.build(tuple(inputs.shape[1:]), splits.classes)
        self.model: GrowingModel = esper.attach(built, offers, inputs)
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=host.learning_rate, weight_decay=0.01))
        self.model.link(self.optimizer)

    def branch(self) -> Training:
        """The same once more, which learns on its own from now on."""
        other = copy.copy(self)
        other.model, other.optimizer = copy.deepcopy((self.model, self.optimizer))
        other.model.link(other.optimizer)
        return other

    def learn(self, epochs: int) -> Training:
        """So many epochs; returns itself."""
        for _ in range(epochs):
            self._epochs += 1
            self.model.train()
            for batch in _minibatches(self._splits.train, child_generator(self._seed, self._epochs)):
                self.optimizer.zero_grad()
                cross_entropy(self.model(batch.inputs), batch).backward()
                self.optimizer.step()
        return self

    def try_out(self, slot: str, blueprint: str) -> Training:
        """Plant a seed, let it come in and be tried; returns itself."""
        place = self.model.slots[slot]
        place.germinate(blueprint, torch.Generator().manual_seed(self._seed))
        for step in range(1, RAMP + 1):
            place.set_alpha(step / RAMP)
            self.learn(1)
        return self.learn(TRIAL)

    def validated(self) -> Score:
        """On validation data."""
        return measure(self.model, self._splits.validation)

    def tested(self) -> Score:
        """On test data."""
        return measure(self.model, self._splits.test)


def _minibatches(examples: Labelled | Windows, rng: np.random.Generator) -> Iterator[Minibatch]:
    return islice(examples.epoch(64, rng), LONGEST_EPOCH)


def _better(one: Score, other: Score) -> tuple[float, float]:
    return one.accuracy - other.accuracy, other.loss - one.loss


def tried(host: Host, splits: Splits, seed: int) -> list[Case]:
    """All cases of a host with one seed."""
    planted = Training(host, splits, seed).learn(BEFORE)
    twin = planted.branch().learn(JUDGED - BEFORE)
    twin_then, twin_in_the_end = twin.validated(), twin.learn(AFTER).tested()
    return [_case(planted, slot, blueprint, twin_then, twin_in_the_end) for slot, blueprint in host.cases]


def _case(planted: Training, slot: str, blueprint: str, twin_then: Score, twin_in_the_end: Score) -> Case:
    grown = planted.branch().try_out(slot, blueprint)
    now = grown.validated()
    without = grown.branch()
    without.model.slots[slot].prune()
    measures = {"dependence": _better(now, without.validated()), "progress": _better(now, planted.validated())}
    refitted = without.learn(REFIT).validated()
    later = grown.learn(REFIT).validated()
    measures |= {"refit": _better(later, refitted), "twin": _better(now, twin_then)}
    return Case(slot, blueprint, measures, _better(grown.learn(AFTER - REFIT).tested(), twin_in_the_end))


def _cases(folder: Path, name: str, seed: int, console: Console) -> list[Case]:
    path = folder / f"{name}-{seed}.json"
    if not path.exists():
        host = HOSTS[name]
        found = tried(host, load(host.task), seed)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps([asdict(case) for case in found]))
        console.print(f"{name} {seed}: done", style="dim")
    return [
        Case(one["slot"], one["blueprint"], {k: tuple(v) for k, v in one["measures"].items()}, tuple(one["gain"]))
        for one in json.loads(path.read_text())
    ]


Floats = NDArray[np.float64]


def _by_host(cases: dict[str, list[list[Case]]], console: Console) -> None:
    """What each measure says of each host's seeds, and what they bring, by accuracy."""
    table = Table("host", "slot", "blueprint", *MEASURES, "gain", box=None)
    for name, by_seed in cases.items():
        for own in zip(*by_seed, strict=True):
            means = [np.mean([case.measures[measure][0] for case in own]) for measure in MEASURES]
            gains = np.array([case.gain[0] for case in own])
            spread = gains.std(ddof=1) if len(gains) > 1 else float("nan")
            shown = [f"{mean:+.3f}" for mean in means]
            table.add_row(name, own[0].slot, own[0].blueprint, *shown, f"{gains.mean():+.3f} ± {spread:.3f}")
    console.print(table)


def _predictions(cases: dict[str, list[list[Case]]], console: Console) -> None:
    """How well each measure tells gains: means over training seeds with their standard deviation."""
    prices = [f"kept, at {price}" for price in PRICES]
    table = Table("measure", "in", "rank correlation", "mean error", "RMS error", "keeps", *prices, box=None)
    for unit, word in enumerate(("accuracy", "loss")):
        gains = _array(cases, lambda case, unit=unit: case.gain[unit])
        for name in MEASURES:
            told = _array(cases, lambda case, unit=unit, name=name: case.measures[name][unit])
            table.add_row(
                name,
                word,
                _spread([_rank_correlation(told[:, seed], gains[:, seed]) for seed in range(gains.shape[1])]),
                _spread((told - gains).mean((0, 2))),
                _spread(np.sqrt(((told - gains) ** 2).mean((0, 2)))),
                f"{(told > 0).mean():.0%}",
                *(_spread(((gains - price) * (told > price)).mean((0, 2))) for price in PRICES),
            )
        kept_all = [_spread((gains - price).mean((0, 2))) for price in PRICES]
        table.add_row("everything", word, "", "", "", "100%", *kept_all)
        best = [_spread(np.maximum(gains - price, 0).mean((0, 2))) for price in PRICES]
        table.add_row("the gain itself", word, "", "", "", f"{(gains > 0).mean():.0%}", *best)
    console.print(table)


def _array(cases: dict[str, list[list[Case]]], of: Callable[[Case], float]) -> Floats:
    """``[hosts, seeds, cases]``."""
    return np.array([[[of(case) for case in own] for own in by_seed] for by_seed in cases.values()])


def _rank_correlation(told: Floats, gains: Floats) -> float:
    """Spearman's, over the cases of all hosts ``[hosts, cases]``."""
    return float(spearmanr(told.ravel(), gains.ravel()).statistic)


def _spread(by_seed: Floats | list[float]) -> str:
    deviation = np.std(by_seed, ddof=1) if len(by_seed) > 1 else float("nan")
    return f"{np.mean(by_seed):+.3f} ± {deviation:.3f}"


def main(
    folder: tyro.conf.Positional[Path],
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    hosts: tuple[str, ...] = tuple(HOSTS),
) -> None:
    """Run what is missing, and print the tables."""
    prepare_process()
    console = Console(width=160)
    cases = {name: [_cases(folder, name, seed, console) for seed in seeds] for name in hosts}
    _by_host(cases, console)
    _predictions(cases, console)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
