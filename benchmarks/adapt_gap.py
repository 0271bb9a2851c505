"""Does it matter where a trained network is adapted? The oracle gap: best place per shift less best place overall.

    python benchmarks/adapt_gap.py FOLDER                # three hours of one core; may be stopped
    python benchmarks/adapt_gap.py FOLDER --table        # what is known so far

A host is trained, and frozen. Then the data shift: inputs, sub-classes (of a language model: kinds of text) or labels.
One seed of one kind is planted in one place and learns from 200 examples of the new data; so is every other place, one
at a time. Places are chosen by all seeds but one and judged by that one, so that the luck of the best of many is not
counted.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from adapt_texts import ALPHABET, LENGTH, WINDOWS, Windows, cut, list_shifts
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.hosts import HOSTS

import esper
from esper.dash.output import print_line
from esper.tasks.datasets import digits, mnist1d
from esper.tasks.texts import read_text
from esper.train.workers import prepare_process

CONSOLE = Console()
TARGET = 200
"""Examples of the new data."""
EPOCHS, BATCH = 30, 50
RATES = (0.01, 0.03)
"""Of Adam; for each host and kind that one counts which is better on the other shifts."""
RAMP = 20
"""Steps until the copy of a block counts fully."""
SOURCE_EPOCHS = 30
SOURCE_SHARE = 0.5
"""Of the data, that the host is trained on."""
CLASSES = 10
MOST = 1000
"""Examples in one pass."""
FEATURE_SHIFTS = 4

Shift = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A host, what it learns and is to learn, and where it may be adapted."""

    host: str
    shape: tuple[int, ...]
    """Of one input."""
    classes: int
    problems: Callable[[int], Iterator[Problem]]
    """Twelve shifts of three kinds, with another split of the data for each seed."""
    places: dict[str, list[str]]
    """Submodules, by the blueprint that is planted there."""


def blur(images: Tensor) -> Tensor:
    return F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)


def noisy(deviation: float) -> Shift:
    return lambda inputs: inputs + deviation * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))


IMAGE_SHIFTS: dict[str, Shift] = {
    "noise": noisy(1.0),
    "blur": blur,
    "inversion": lambda images: -images,
    "rotation": lambda images: images.rot90(1, (2, 3)),
}
SIGNAL_SHIFTS: dict[str, Shift] = {
    "noise": noisy(0.5),
    "smoothing": lambda signals: F.avg_pool1d(signals, 5, stride=1, padding=2, count_include_pad=False),
    "inversion": lambda signals: -signals,
    "reversal": lambda signals: signals.flip(2),
}


@dataclass(frozen=True)
class Data:
    """Examples and labels."""

    inputs: Tensor
    labels: Tensor

    def pick(self, rows: Tensor) -> Data:
        return Data(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class Problem:
    """What a host has learned, and what it is to learn by few examples."""

    shift: str
    kind: str
    source: Data
    target: Data
    test: Data
    held: Data
    """More of what the host has learned, which nothing is trained on, not after the shift either."""


def shift_classes(
    load: Callable[[], tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...], shifts: dict[str, Shift], seed: int
) -> Iterator[Problem]:
    """Of examples of ten classes: these shifts of inputs ``[N, *shape]``, other sub-classes, other labels."""
    inputs, labels = (torch.from_numpy(np.array(part)) for part in load())
    inputs = inputs.float().view(-1, *shape)
    whole = Data((inputs - inputs.mean()) / inputs.std(), labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    count = int(SOURCE_SHARE * len(labels))
    source, rest = whole.pick(order[:count]), whole.pick(order[count:])
    unseen = rest.pick(slice(TARGET, None))
    for name, shift in shifts.items():
        moved = Data(shift(rest.inputs), rest.labels)
        yield Problem(name, "input", source, moved.pick(slice(TARGET)), moved.pick(slice(TARGET, None)), unseen)
    permuted = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(1))
    answers: dict[str, Callable[[Tensor], Tensor]] = {
        "cycled": lambda labels: (labels + 1) % CLASSES,
        "permuted": lambda labels: permuted[labels],
        "merged": lambda labels: labels // 2,
        "folded": lambda labels: labels % (CLASSES // 2),
    }
    for name, answer in answers.items():
        moved = Data(rest.inputs, answer(rest.labels))
        yield Problem(name, "output", source, moved.pick(slice(TARGET)), moved.pick(slice(TARGET, None)), unseen)
    for number in range(FEATURE_SHIFTS):
        pairs = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(number)).view(-1, 2)
        parent = torch.empty(CLASSES, dtype=torch.int64)
        parent[pairs] = torch.arange(len(pairs)).unsqueeze(1)
        seen = torch.isin(whole.labels, pairs[:, 0])
        known = source.pick(seen[order[:count]])
        new = whole.pick(order).pick(~seen[order])
        held = rest.pick(seen[order[count:]])
        known, new, held = (Data(one.inputs, parent[one.labels]) for one in (known, new, held))
        target, test = new.pick(slice(TARGET)), new.pick(slice(TARGET, None))
        yield Problem(f"sub-classes {number}", "feature", known, target, test, held)


def shift_texts(seed: int) -> Iterator[Problem]:
    """Of a language model."""
    order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(seed))
    inputs, labels = (part[order] for part in cut(read_text("help"), WINDOWS))
    count = int(SOURCE_SHARE * WINDOWS)
    source, rest = Data(inputs[:count], labels[:count]), Data(inputs[count:], labels[count:])
    for name, kind, moved in list_shifts(Windows(rest.inputs, rest.labels)):
        chosen = torch.randperm(len(moved.inputs), generator=torch.Generator().manual_seed(seed))
        new = Data(moved.inputs, moved.labels).pick(chosen)
        held = rest if kind == "feature" else rest.pick(chosen[TARGET:])  # the same windows before the shift
        yield Problem(name, kind, source, new.pick(slice(TARGET)), new.pick(slice(TARGET, None)), held)


RESNET_CONVOLUTIONS = [f"layer{n}.{part}" for n in (1, 2, 3) for part in ("conv1", "conv2")]
VIT_LINEARS = [f"block{n}.{part}" for n in (1, 2) for part in ("attention.inner", "attention.outer", "mlp.0", "mlp.2")]
CASES = (
    Case(
        "resnet",
        (1, 8, 8),
        CLASSES,
        partial(shift_classes, digits, (1, 8, 8), IMAGE_SHIFTS),
        {
            "lora_4": ["stem.0", *RESNET_CONVOLUTIONS, "layer2.skip", "layer3.skip", "head"],
            "conv3x3": ["stem", "layer1", "layer2", "layer3"],
            "block_copy": ["layer1"],
        },
    ),
    Case(
        "vit",
        (1, 8, 8),
        CLASSES,
        partial(shift_classes, digits, (1, 8, 8), IMAGE_SHIFTS),
        {
            "lora_4": ["patches", *VIT_LINEARS, "head"],
            "mlp": ["block1", "block2", "head"],
            "block_copy": ["block1", "block2"],
        },
    ),
    Case(
        "conv1d",
        (1, 40),
        CLASSES,
        partial(shift_classes, mnist1d, (1, 40), SIGNAL_SHIFTS),
        {
            "lora_4": ["layer1.0", "layer2.0", "layer3.0", "head"],
            "conv3x3": ["layer1", "layer2", "layer3"],
            "block_copy": ["layer3"],
        },
    ),
    Case(
        "gpt",
        (LENGTH,),
        len(ALPHABET),
        shift_texts,
        {
            "lora_4": [*VIT_LINEARS, "head"],
            "mlp": ["block1", "block2"],
            "block_copy": ["block1", "block2"],
        },
    ),
)


def train(network: nn.Module, data: Data, epochs: int, batch: int, step: Callable[[Tensor], None], seed: int) -> None:
    """Minibatches in random order; ``step`` is given each loss."""
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(data.labels), generator=generator).split(batch):
            if len(rows) > 1:
                outputs = network(data.inputs[rows])
                step(F.cross_entropy(outputs.flatten(0, -2), data.labels[rows].flatten()))


@torch.no_grad()
def accuracy(network: nn.Module, data: Data) -> float:
    network.eval()
    right = [network(part).argmax(-1) == labels for part, labels in split(data)]
    return float(torch.cat(right).float().mean())


def split(data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """In parts that fit into memory."""
    return zip(data.inputs.split(MOST), data.labels.split(MOST), strict=True)


def train_host(case: Case, problem: Problem, seed: int) -> nn.Module:
    kind = HOSTS[case.host]
    host = kind.build(case.shape, case.classes, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(host.parameters(), kind.learning_rate, weight_decay=kind.weight_decay)
    train(host, problem.source, SOURCE_EPOCHS, kind.batch_size, _stepper(optimizer), seed)
    return host.eval()


def _stepper(optimizer: torch.optim.Optimizer, after: Callable[[], None] = lambda: None) -> Callable[[Tensor], None]:
    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()

    return step


def adapt(host: nn.Module, problem: Problem, place: str, blueprint: str, rate: float, seed: int) -> float:
    """Accuracy on the new data with one seed in that place."""
    model = esper.attach(copy.deepcopy(host), {place: [blueprint]}, problem.target.inputs[:2], freeze_host=True)
    generator = torch.Generator().manual_seed(seed)
    slot = model.slots[place]
    ramps = blueprint == "block_copy"
    slot.germinate(blueprint, generator, alpha=0.0 if ramps else 1.0)
    optimizer = torch.optim.Adam(model.parameter_groups(lr=rate))
    steps = 0

    def ramp() -> None:
        nonlocal steps
        steps += 1
        if ramps:
            slot.set_alpha(min(steps / RAMP, 1.0))

    train(model, problem.target, EPOCHS, BATCH, _stepper(optimizer, ramp), seed)
    return accuracy(model, problem.test)


def measure(folder: Path, case: Case, seed: int) -> None:
    """All places and kinds for every shift that is not known yet."""
    path = folder / f"{case.host}-{seed}.jsonl"
    known = {json.loads(line)["shift"] for line in path.read_text().splitlines()} if path.exists() else set[str]()
    host, learned = None, None
    for problem in case.problems(seed):
        if problem.shift in known:
            continue
        if host is None or learned is not problem.source:
            host, learned = train_host(case, problem, seed), problem.source
        found = {
            f"{blueprint} {place} {rate}": adapt(host, problem, place, blueprint, rate, seed)
            for blueprint, places in case.places.items()
            for place in places
            for rate in RATES
        }
        before = accuracy(host, problem.test)
        record = {"shift": problem.shift, "kind": problem.kind, "before": before, "found": found}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        best = max(found, key=found.__getitem__)
        print_line(CONSOLE, f"{case.host} {seed} {problem.shift}: {before:.3f}, best {found[best]:.3f} by {best}")


def read(folder: Path, case: Case, seeds: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """Accuracy by seed, shift and candidate, each with the rate that is better on the other shifts."""
    records = {
        seed: [json.loads(line) for line in path.read_text().splitlines()]
        for seed in seeds
        if (path := folder / f"{case.host}-{seed}.jsonl").exists()
    }
    if not records:
        return {}
    most = max(map(len, records.values()))
    records = {seed: found for seed, found in records.items() if len(found) == most}
    shifts = set.intersection(*({one["shift"] for one in found} for found in records.values()))
    table: dict[int, dict[str, dict[str, float]]] = {seed: {} for seed in records}
    for shift in sorted(shifts):
        rates: dict[str, float] = {}
        for blueprint in case.places:
            means = defaultdict[float, list[float]](list)
            for found in records.values():
                for one in found:
                    if one["shift"] != shift:
                        for name, value in one["found"].items():
                            kind, _, rate = name.split()
                            if kind == blueprint:
                                means[float(rate)].append(value)
            rates[blueprint] = max(means, key=lambda rate: float(np.mean(means[rate])))
        for seed, found in records.items():
            one = next(one for one in found if one["shift"] == shift)
            table[seed][shift] = {
                f"{blueprint} {place}": one["found"][f"{blueprint} {place} {rates[blueprint]}"]
                for blueprint, places in case.places.items()
                for place in places
            }
    return table


def show(folder: Path, cases: Sequence[Case], seeds: Sequence[int]) -> None:
    """The gaps: host by host, and over all shifts."""
    everything: list[float] = []
    for case in cases:
        table = read(folder, case, seeds)
        if len(table) < 2:
            print_line(CONSOLE, f"{case.host}: {len(table)} seeds, which is too few to choose a place by others")
            continue
        everything += show_host(case, table)
    if everything:
        print_line(
            CONSOLE, f"all: {len(everything)} shifts, gap {_points(np.array(everything))}, as if hosts shared none"
        )


def show_host(case: Case, table: dict[int, dict[str, dict[str, float]]]) -> list[float]:
    """A host's gap and that of each shift, which are returned."""
    seeds, shifts = sorted(table), sorted(next(iter(table.values())))
    means = {shift: _mean([table[seed][shift] for seed in seeds]) for shift in shifts}
    everywhere = _mean(list(means.values()))
    upper = np.array([max(means[shift].values()) for shift in shifts]) - max(everywhere.values())
    oracle, overall = np.zeros((2, len(seeds), len(shifts)))
    for row, seed in enumerate(seeds):
        others = {shift: _mean([table[other][shift] for other in seeds if other != seed]) for shift in shifts}
        fixed = _best(_mean(list(others.values())))
        for column, shift in enumerate(shifts):
            oracle[row, column] = table[seed][shift][_best(others[shift])]
            overall[row, column] = table[seed][shift][fixed]
    gaps = (oracle - overall).mean(0)
    print_line(
        CONSOLE,
        f"{case.host}: {len(seeds)} seeds, {len(shifts)} shifts; best place per shift {oracle.mean():.3f}, "
        f"best overall {overall.mean():.3f} ({_best(everywhere)}), gap {_points(gaps)}; chosen by the same seeds "
        f"{100 * upper.mean():+.1f}",
    )
    for shift, gap in zip(shifts, gaps, strict=True):
        ranked = sorted(means[shift], key=means[shift].__getitem__, reverse=True)
        told = ", ".join(f"{name} {means[shift][name]:.3f}" for name in ranked[:3])
        print_line(CONSOLE, f"  {shift:15} gap {100 * gap:+5.1f}   {told}")
    return gaps.tolist()


def _points(gaps: np.ndarray) -> str:
    """Mean and standard error over shifts."""
    return f"{100 * gaps.mean():+.1f} ± {100 * gaps.std(ddof=1) / len(gaps) ** 0.5:.1f} points"


def _best(found: dict[str, float]) -> str:
    return max(found, key=found.__getitem__)


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def main(
    folder: tyro.conf.Positional[Path],
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="Of hosts, data and adaptations.")] = (0, 1, 2, 3, 4),
    hosts: tuple[str, ...] = tuple(case.host for case in CASES),
    table: bool = False,
) -> None:
    """Measure what is not known yet, and print the table."""
    names = [case.host for case in CASES]
    if strange := [name for name in hosts if name not in names]:
        raise SystemExit(f"there is no {strange[0]!r}: take of {', '.join(names)}")
    prepare_process()
    make_folder(folder)
    cases = [case for case in CASES if case.host in hosts]
    if not table:
        for seed in seeds:
            for case in cases:
                measure(folder, case, seed)
    show(folder, cases, seeds)


def make_folder(folder: Path) -> None:
    """Where results are kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{folder} cannot be a folder for results: {error}") from error


if __name__ == "__main__":
    tyro.cli(main)
