"""Several sizes of a language model from one training that grows: what do they lose, and what do they save?

    python benchmarks/ladder.py FOLDER alone        # each depth by itself: learning rates, then five seeds
    python benchmarks/ladder.py FOLDER climb        # `esper.ladder`, which doubles its depth: two shares, five seeds
    python benchmarks/ladder.py FOLDER joint        # one network with an exit at each depth, for the ladder's FLOPs
    python benchmarks/ladder.py FOLDER star         # each depth from the first one at once: times 2, 4 and 8
    python benchmarks/ladder.py FOLDER distil       # the deepest, pruned and distilled
    python benchmarks/ladder.py FOLDER other        # the first three on another text, with the same settings
    python benchmarks/ladder.py FOLDER time         # seconds of the ladder and of all sizes alone, in turns
    python benchmarks/ladder.py FOLDER table

Another width or budget belongs in another folder: ``--width 64 --steps 9600`` with each of these. Started several times
at once, a command shares its work with the others (but for ``time``). ``--device cuda`` trains on a GPU.

Depths 1, 2, 4 and 8. *Alone*, each is trained for the same number of steps: warm-up, stable, decay. The *ladder*
trains one block, as long as alone; a branch decays and is the first rung, while the model itself gains a copy behind
each block, with the block's moments of AdamW, and trains on for a share of the steps; and so on. *Joint*, one network
of the greatest depth has an exit after each of the depths, with a norm and a head of its own, and learns the mean of
their losses for the FLOPs of the ladder, with and without layer dropout. In a *star* every size comes from the model
with one block, with the ladder's share, so for the same FLOPs. *Distilled* networks
keep every other block of the deepest network, and so on, and learn side by side from its answers, which are computed
once for all of them. All training FLOPs are counted, the teacher's, too: with 80% of those of all sizes alone,
distillation has more than the ladder takes.
Seed 0 chooses by validation loss: learning rates, layer dropout, weights. Of the ladder both shares are reported.
Seeds 1 to 5 and the text's last tenth, which nothing else reads, are reported. What was killed goes on: each result is
kept as soon as it is there, and a ladder from its last checkpoint.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from safetensors.torch import load_file
from tiny_gpt import (
    BATCH,
    CHOOSING_TEXT,
    OTHER_TEXT,
    WIDTH,
    WINDOW,
    Gpt,
    Stream,
    TextName,
    attach,
    endless,
    learn,
    make_adamw,
    make_optimizer,
    measure,
    step_down,
    text,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from zoo.data import Splits

import esper
from esper.dash.output import print_line
from esper.files import write_atomically
from esper.grower.spending import Spending
from esper.ladders.plan import count_forward, warmup_stable_decay
from esper.numerics.devices import describe_platform

DEPTHS = (1, 2, 4, 8)
STEPS, DECAY = 4800, 0.2
"""Of each network alone, and the share of them at falling rates."""
RATES = (6e-3, 12e-3, 24e-3, 48e-3)
"""Learning rates at the width `WIDTH`, which fall as 1 / width (Yang et al. 2022, arXiv 2203.03466), for seed 0 to
choose from."""
SHARES = (0.2, 0.5)
"""Of the steps, which the ladder spends at each depth but the first, the decay left out: the default, and one by which
the rungs are as good as networks alone."""
DISTILLED, DISTILLING = 0.8, tuple(itertools.product((12e-3, 24e-3, 48e-3), (0.25, 0.5, 1.0)))
"""Share of the FLOPs of all sizes alone that the deepest network and those distilled of it take together; learning
rates and weights of the teacher's answers in the loss, to choose from."""
JOINT = (*itertools.product((6e-3, 12e-3, 24e-3), (0.0, 0.1)), (48e-3, 0.0))
"""Learning rates and layer dropout of the network with exits, to choose from."""
TURNS = 3
"""How often the time of both ways is measured."""
CHOOSING, FINAL_SEEDS = 0, (1, 2, 3, 4, 5)
WAYS = {"climb": "ladder", "joint": "joint exits", "star": "star", "distil": "distilled"}
"""Titles of the ways to several sizes."""
Step = Literal["alone", "climb", "joint", "star", "distil", "other", "time", "table"]
Setting = tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """Of one network."""

    way: str
    depth: int
    setting: Setting
    """Alone, the learning rate; of a ladder or a star, its share; of exits, the rate, layer dropout, and the share of
    the ladder that costs as much; distilled, the rate and the weight of the teacher's answers."""
    seed: int
    validation: float
    test: float
    flops: float
    """Of its own training; of the ladder, of all up to here; of a star, of its own part; of exits, of all of them; of
    what is distilled, with its part of the answers, and without the teacher's training."""


ALL_SHARES = math.nan
"""The share of what depends on none."""


class Store:
    """Results on one text, kept as JSON lines, and the networks to distil."""

    def __init__(
        self,
        folder: Path,
        text: TextName = CHOOSING_TEXT,
        steps: int | None = None,
        width: int = WIDTH,
        device: str = "cpu",
    ) -> None:
        self.steps, self.width, self.device = steps or STEPS, width, torch.device(device)
        self.folder, self.text = folder, text
        self._chosen = ResultFile(folder / "ladder.jsonl", Result, device)
        other = ResultFile(folder / f"ladder-{text}.jsonl", Result, device)
        self.file = self._chosen if text == CHOOSING_TEXT else other

    @property
    def results(self) -> list[Result]:
        """On this text."""
        return self.file.results

    @property
    def choices(self) -> list[Result]:
        """Of the seed and the text that choose."""
        return [one for one in self._chosen.results if one.seed == CHOOSING]

    def knows(self, way: str, depth: int, setting: Setting, seed: int) -> bool:
        return any((one.way, one.depth, one.setting, one.seed) == (way, depth, setting, seed) for one in self.results)

    def add(self, *results: Result) -> None:
        self.file.add(*results)

    def load_text(self) -> Splits:
        """On the device."""
        return text(self.text).to(self.device)

    def teacher_path(self, seed: int) -> Path:
        """Of the deepest network, trained alone."""
        return self.folder / f"teacher-{seed}.pt"

    def of(self, way: str, depth: int, share: float = ALL_SHARES) -> list[Result]:
        """Those of the seeds that chose nothing, with the best setting, in the order of seeds."""
        if way not in ("climb", "star") and not self._find_choices(way, depth, share):
            return []
        setting = self.best(way, depth, share)
        known = [one for one in self.results if (one.way, one.depth, one.setting) == (way, depth, setting)]
        return sorted((one for one in known if one.seed != CHOOSING), key=lambda one: one.seed)

    def best(self, way: str, depth: int, share: float = ALL_SHARES) -> Setting:
        """The setting with the least validation loss of the seed that chooses, of exits in the mean over depths; of a
        ladder or a star, its share.
        """
        if way in ("climb", "star"):
            return (share,)
        found = self._find_choices(way, depth, share)
        if not found:
            raise SystemExit(f"nothing is known of step {way} yet: run that before")
        return min(found, key=lambda setting: (np.mean(found[setting]), setting))

    def _find_choices(self, way: str, depth: int, share: float) -> dict[Setting, list[float]]:
        """Validation losses by setting, of exits those of all depths."""
        found: dict[Setting, list[float]] = {}
        for one in self.choices:
            fits = one.setting[-1] == share if way == "joint" else one.depth == depth
            if one.way == way and fits:
                found.setdefault(one.setting, []).append(one.validation)
        return found


def judge(store: Store, network: nn.Module) -> tuple[float, float]:
    """Validation and test loss."""
    parts = store.load_text()
    return measure(network, parts.validation.in_order(256)), measure(network, parts.test.in_order(256))


def begin(store: Store, seed: int, depth: int) -> tuple[Gpt, Iterator[tuple[Tensor, Tensor]]]:
    """A network and its minibatches."""
    torch.manual_seed(seed)
    parts = store.load_text()
    return Gpt(depth, parts.classes, store.width).to(store.device), endless(parts.train, np.random.default_rng(seed))


def train_alone(store: Store, depth: int, setting: Setting, seed: int) -> None:
    """As `train_by_itself`, and judged."""
    network, flops = train_by_itself(store, depth, setting, seed)
    store.add(Result("alone", depth, setting, seed, *judge(store, network), flops))


def train_by_itself(store: Store, depth: int, setting: Setting, seed: int) -> tuple[Gpt, float]:
    """A network, and its FLOPs: warm-up, stable, decay."""
    network, minibatches = begin(store, seed, depth)
    model = attach(network)
    optimizer, spending = make_optimizer(model, *setting), Spending(model)
    scheduler = LambdaLR(optimizer, lambda step: warmup_stable_decay(step / store.steps, decay=DECAY))
    for _ in range(store.steps):
        learn(model, optimizer, next(minibatches))
        scheduler.step()
    return network, spending.flops


def climb(store: Store, setting: Setting, seed: int) -> None:
    """One training with a branch at each depth, which is decayed; the rates are those that are best alone."""
    rungs = train_ladder(store, DEPTHS, setting, seed)
    store.add(*(Result("climb", depth, setting, seed, *judge(store, one), f) for depth, (one, f) in rungs.items()))
    shutil.rmtree(find_folder(store, DEPTHS, setting, seed))


def find_folder(store: Store, depths: Sequence[int], setting: Setting, seed: int) -> Path:
    """Of a ladder, until its results are stored."""
    return store.folder / f"rungs-{store.text}-{'-'.join(map(str, depths))}-{setting[0]:g}-{seed}"


def train_ladder(
    store: Store, depths: Sequence[int], setting: Setting, seed: int
) -> dict[int, tuple[nn.Module, float]]:
    """By depth, the network, and the FLOPs up to there."""
    (share,), (rate,) = setting, store.best("alone", depths[0])
    network, _ = begin(store, seed, depths[0])
    minibatches = Stream(store.load_text().train, seed)
    made = esper.ladder(
        network,
        lambda model, optimizer, step: learn(model, optimizer, minibatches[step]),
        depths=depths,
        steps=store.steps,
        share=share,
        decay=DECAY,
        rates=[store.best("alone", depth)[0] / rate for depth in depths],
        optimizer=make_adamw(network.parameters(), rate),
        example_input=torch.zeros(BATCH, WINDOW, dtype=torch.int64, device=store.device),
        folder=find_folder(store, depths, setting, seed),
    )
    rungs: dict[int, tuple[nn.Module, float]] = {}
    for rung in made.rungs:
        plain, _ = begin(store, seed, rung.depth)
        plain.load_state_dict(load_file(rung.path / "model.safetensors"))
        rungs[rung.depth] = (plain, rung.flops)
    return rungs


def train_star(store: Store, setting: Setting, seed: int) -> None:
    """A ladder of two rungs for each depth, whose first one is the same, and counts once."""
    for depth in DEPTHS[1:]:
        if not store.knows("star", depth, setting, seed):
            rungs = train_ladder(store, (DEPTHS[0], depth), setting, seed)
            (network, flops), (_, first) = rungs[depth], rungs[DEPTHS[0]]
            store.add(Result("star", depth, setting, seed, *judge(store, network), flops - first))
            shutil.rmtree(find_folder(store, (DEPTHS[0], depth), setting, seed))


class Exits(nn.Module):
    """A network with an exit after each of the depths: indices int64 ``[B, T]`` to logits ``[exits, B, T, classes]``.

    In training each block is left out with the probability ``dropout`` (Fan et al. 2019, arXiv 1909.11556).
    """

    def __init__(self, network: Gpt, dropout: float, seed: int) -> None:
        super().__init__()
        self.network, self.dropout, self._rng = network, dropout, np.random.default_rng((seed, 1))
        self.norms = nn.ModuleDict({str(depth): copy.deepcopy(network.norm) for depth in DEPTHS})
        self.heads = nn.ModuleDict({str(depth): copy.deepcopy(network.head) for depth in DEPTHS})

    def forward(self, indices: Tensor) -> Tensor:
        network = self.network
        hidden = network.characters(indices) + network.positions.weight[: indices.shape[1]]
        logits = list[Tensor]()
        for depth, block in enumerate(network.blocks, start=1):
            if not self.training or self._rng.random() >= self.dropout:
                hidden = block(hidden)
            if depth in DEPTHS:
                logits.append(self.heads[str(depth)](self.norms[str(depth)](hidden)))
        return torch.stack(logits)


class Exit(nn.Module):
    """One of them."""

    def __init__(self, exits: Exits, index: int) -> None:
        super().__init__()
        self.exits, self.index = exits, index

    def forward(self, indices: Tensor) -> Tensor:
        return self.exits(indices)[self.index]


def train_joint(store: Store, setting: Setting, seed: int) -> None:
    """All depths in one network, for as many FLOPs as the ladder takes, without those of blocks that are left out."""
    rate, dropout, share = setting
    network, minibatches = begin(store, seed, DEPTHS[-1])
    exits = Exits(network, dropout, seed)
    example = torch.zeros(BATCH, WINDOW, dtype=torch.int64, device=store.device)
    one, two = (count_forward(begin(store, seed, depth)[0], example)[0] for depth in (1, 2))
    cost = 3 * (count_forward(exits.eval(), example)[0] - dropout * DEPTHS[-1] * (two - one))
    steps = round(store.of("climb", DEPTHS[-1], share)[0].flops / cost)  # the same for all seeds
    optimizer = make_adamw(exits.train().parameters(), rate)
    for step in range(steps):
        set_rate(optimizer, rate * warmup_stable_decay(step / steps, decay=DECAY))
        inputs, targets = next(minibatches)
        logits = exits(inputs)
        loss = F.cross_entropy(logits.flatten(0, 2), targets.flatten().repeat(len(DEPTHS)))
        step_down(exits, optimizer, loss)
    for index, depth in enumerate(DEPTHS):
        store.add(Result("joint", depth, setting, seed, *judge(store, Exit(exits, index)), steps * cost))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class Student:
    """Some blocks of the deepest network, which learn from its answers and from the text."""

    def __init__(self, store: Store, teacher: Gpt, depth: int, setting: Setting) -> None:
        pruned = (prune(teacher, depth, last) for last in (False, True))
        self.network = min(pruned, key=lambda one: judge(store, one)[0]).train()
        self.model, (self.rate, self.weight) = attach(self.network), setting
        self.spending, self.optimizer = Spending(self.model), make_optimizer(self.model, self.rate)

    def learn(self, inputs: Tensor, targets: Tensor, answers: Tensor, share: float) -> None:
        """A step, at a rate by the share of the training that is over; ``answers`` are log-probabilities."""
        set_rate(self.optimizer, self.rate * warmup_stable_decay(share, warmup=0.1, decay=0.9))
        logits = self.model(inputs).flatten(0, 1)
        by_teacher = F.kl_div(logits.log_softmax(-1), answers, reduction="batchmean", log_target=True)
        by_text = F.cross_entropy(logits, targets.flatten())
        step_down(self.model, self.optimizer, self.weight * by_teacher + (1 - self.weight) * by_text)


def distil(store: Store, chosen: Mapping[int, Setting], seed: int) -> None:
    """All sizes but the largest, by depth, from the same answers of the largest, which are paid for once."""
    teacher, minibatches = begin(store, seed, DEPTHS[-1])
    teacher.load_state_dict(torch.load(store.teacher_path(seed), map_location=store.device))
    students = {depth: Student(store, teacher, depth, setting) for depth, setting in chosen.items()}
    watched = attach(teacher.eval())
    answering, steps = Spending(watched), afford(store)
    for step in range(steps):
        inputs, targets = next(minibatches)
        with torch.no_grad():
            answers = watched(inputs).flatten(0, 1).log_softmax(-1)
        for student in students.values():
            student.learn(inputs, targets, answers, step / steps)
    flops = {depth: one.spending.flops + answering.flops / len(students) for depth, one in students.items()}
    judged = {depth: judge(store, one.network) for depth, one in students.items()}
    store.add(*(Result("distil", depth, chosen[depth], seed, *judged[depth], flops[depth]) for depth in students))


def prune(teacher: Gpt, depth: int, last: bool) -> Gpt:
    """The first block of each run of blocks, or the last."""
    student, run = copy.deepcopy(teacher), len(teacher.blocks) // depth
    student.blocks = nn.ModuleList(student.blocks[index * run + (run - 1 if last else 0)] for index in range(depth))
    return student


def afford(store: Store) -> int:
    """Steps of distillation, the same for each depth, by which all sizes cost `DISTILLED` of what they cost alone."""
    each = {depth: store.of("alone", depth)[0].flops / store.steps for depth in DEPTHS}
    deepest = each[DEPTHS[-1]]
    left = (DISTILLED * sum(each.values()) - deepest) * store.steps
    teachers_answer = deepest / 3  # the forward pass
    return round(left / (sum(each[depth] for depth in DEPTHS[:-1]) + teachers_answer))


def run(
    store: Store,
    way: str,
    tasks: list[tuple[int, Setting, int]],
    train: Callable[[int, Setting, int], None],
) -> None:
    """What is not known yet of trainings, each a depth, a setting and a seed."""

    def train_one(task: tuple[int, Setting, int]) -> None:
        train(*task)
        depth, setting, seed = task
        values = ", ".join(f"{value:g}" for value in setting)
        print_line(Console(), f"{store.text}: {way}, depth {depth}, {values}, seed {seed}: done")

    store.file.run_missing(tasks, lambda task: store.knows(way, *task), train_one)


def main(
    folder: tyro.conf.Positional[Path],
    step: tyro.conf.Positional[Step],
    steps: int | None = None,
    width: int = WIDTH,
    device: str = "cpu",
) -> None:
    """Run a step of the experiment, or what is missing of it; `table` prints what is known.

    Args:
        folder: For the results; one for each width and number of steps.
        step: What to run, in this order; `alone` comes first, since it finds the learning rates.
        steps: Of each network alone (4,800 if omitted).
        width: Of the networks.
        device: Trains the networks, such as cuda.
    """
    torch.set_num_threads(1)
    stores = {name: Store(folder, name, steps, width, device) for name in (CHOOSING_TEXT, OTHER_TEXT)}
    ways = {
        "alone": run_alone,
        "climb": run_climb,
        "joint": run_joint,
        "star": run_star,
        "distil": run_distil,
        "time": measure_time,
    }
    if step == "other":
        for way in (run_alone, run_climb, run_joint):
            way(stores[OTHER_TEXT])
    elif step != "table":
        ways[step](stores[CHOOSING_TEXT])
    for store in stores.values():
        show(store, Console(width=110))


def run_alone(store: Store) -> None:
    """The deepest first, as they take longest."""
    depths, train = DEPTHS[::-1], partial(train_alone, store)
    if store.text == CHOOSING_TEXT:
        rates = [(rate * WIDTH / store.width,) for rate in RATES]
        run(store, "alone", [(depth, rate, CHOOSING) for depth in depths for rate in rates], train)
    finals = [(depth, store.best("alone", depth), seed) for depth in depths for seed in FINAL_SEEDS]
    run(store, "alone", finals, train)


def run_climb(store: Store) -> None:
    tasks = [(DEPTHS[-1], (share,), seed) for share in SHARES for seed in FINAL_SEEDS]
    run(store, "climb", tasks, lambda _, share, seed: climb(store, share, seed))


def run_joint(store: Store) -> None:
    def train(_: int, setting: Setting, seed: int) -> None:
        train_joint(store, setting, seed)

    if store.text == CHOOSING_TEXT:
        settings = [(rate * WIDTH / store.width, dropout, share) for share in SHARES for rate, dropout in JOINT]
        run(store, "joint", [(DEPTHS[-1], setting, CHOOSING) for setting in settings], train)
    best = [store.best("joint", DEPTHS[-1], share) for share in SHARES]
    run(store, "joint", [(DEPTHS[-1], setting, seed) for setting in best for seed in FINAL_SEEDS], train)


def run_star(store: Store) -> None:
    tasks = [(DEPTHS[-1], (share,), seed) for share in SHARES for seed in FINAL_SEEDS]
    run(store, "star", tasks, lambda _, share, seed: train_star(store, share, seed))


def run_distil(store: Store) -> None:
    """All settings with the seed that chooses, and for each depth its best one with the others."""

    def train_teacher(seed: int) -> None:
        network, _ = train_by_itself(store, DEPTHS[-1], store.best("alone", DEPTHS[-1]), seed)
        path = store.teacher_path(seed)
        torch.save(network.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def is_known(task: tuple[dict[int, Setting], int]) -> bool:
        return all(store.knows("distil", depth, setting, task[1]) for depth, setting in task[0].items())

    def distil_one(task: tuple[dict[int, Setting], int]) -> None:
        distil(store, *task)
        print_line(Console(), f"distil, seed {task[1]}: done")

    def run_missing(tasks: list[tuple[dict[int, Setting], int]]) -> None:
        store.file.run_missing(tasks, is_known, distil_one)

    store.file.run_missing((CHOOSING, *FINAL_SEEDS), lambda seed: store.teacher_path(seed).exists(), train_teacher)
    settings = [(rate * WIDTH / store.width, weight) for rate, weight in DISTILLING]
    run_missing([(dict.fromkeys(DEPTHS[:-1], setting), CHOOSING) for setting in settings])
    run_missing([({depth: store.best("distil", depth) for depth in DEPTHS[:-1]}, seed) for seed in FINAL_SEEDS])


def measure_time(store: Store) -> None:
    """Seconds of training of ladders and of all sizes alone, in turns, with seed 0 and the rates chosen."""
    rows = list[dict[str, float]]()
    for _ in range(TURNS):
        began = time.perf_counter()
        for depth in DEPTHS:
            train_by_itself(store, depth, store.best("alone", depth), CHOOSING)
        row = {"alone": time.perf_counter() - began}
        for share in SHARES:
            folder = find_folder(store, DEPTHS, (share,), CHOOSING)
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            began = time.perf_counter()
            train_ladder(store, DEPTHS, (share,), CHOOSING)
            row[f"{share:g}"] = time.perf_counter() - began
            shutil.rmtree(folder)
        rows.append(row)
        for line in tabulate_time(rows):
            print_line(Console(), line)
    found = {"steps": store.steps, "seconds": rows, "platform": describe_platform([str(store.device)])}
    write_atomically(store.folder / "time.json", json.dumps(found) + "\n")


def tabulate_time(rows: list[dict[str, float]]) -> list[str]:
    """Lines of a Markdown table of seconds by turn, and by how much those of the ladders are less."""
    lines = [f"| turn | alone | {' | '.join(f'ladder, share {share:g}' for share in SHARES)} |", "|---" * 4 + "|"]
    for turn, row in enumerate(rows, start=1):
        cells = [f"{row[f'{share:g}']:.0f} s ({row[f'{share:g}'] / row['alone'] - 1:+.0%})" for share in SHARES]
        lines.append(f"| {turn} | {row['alone']:.0f} s | {' | '.join(cells)} |")
    return lines


def show(store: Store, console: Console) -> None:
    """Tables, and what seed 0 chose from."""
    if not store.results or not all(knows(store, "alone", depth) for depth in DEPTHS):
        print_line(console, f"{store.text}: not all depths have been trained alone by all seeds yet")
        return
    for line in (*tabulate(store), "", *tabulate_rivals(store), ""):
        print_line(console, line)
    for way in ("alone", "joint", "distil"):
        for one in sorted(store.results, key=lambda one: (one.depth, one.validation)):
            if one.way == way and one.seed == CHOOSING:
                chosen = ", ".join(f"{value:g}" for value in one.setting)
                print_line(console, f"{way}, depth {one.depth}, {chosen}: validation {one.validation:.4f}")


def tabulate(store: Store) -> list[str]:
    """Lines of a Markdown table: losses alone, and by way and share what others have more or less, and cost.

    Means and standard deviations of losses; means and standard errors of differences, which are paired by seed.
    """
    alone = {depth: store.of("alone", depth) for depth in DEPTHS}
    total = sum(found[0].flops for found in alone.values())
    lines = [
        f"| | share | {' | '.join(f'{depth} blocks' for depth in DEPTHS)} | FLOPs | saved |",
        "|---" * (4 + len(DEPTHS)) + "|",
        f"| alone: loss | | {' | '.join(spread(alone[depth]) for depth in DEPTHS)} | {total:.3g} | |",
    ]
    for way, share in list_ways(store):
        found = {depth: store.of(way, depth, share) for depth in list_depths(way)}
        # A star has the first rung of the ladder, and what is distilled has its teacher beside it.
        flops = found[DEPTHS[1]][0].flops
        if way == "climb":
            flops = found[DEPTHS[-1]][0].flops
        elif way in ("star", "distil"):
            (left_out,) = set(DEPTHS) - set(found)
            flops = alone[left_out][0].flops + sum(results[0].flops for results in found.values())
        cells = [beside(found[depth], alone[depth]) if depth in found else "" for depth in DEPTHS]
        of_share = "" if math.isnan(share) else f"{share:g}"
        lines.append(f"| {WAYS[way]} | {of_share} | {' | '.join(cells)} | {flops:.3g} | {1 - flops / total:.0%} |")
    return lines


def tabulate_rivals(store: Store) -> list[str]:
    """Lines of a Markdown table: what other ways lose beside the ladder for the same FLOPs."""
    rivals = [(way, share) for way, share in list_ways(store) if way in ("joint", "star")]
    lines = [f"| | share | {' | '.join(f'{depth} blocks' for depth in DEPTHS)} |"]
    lines.append("|---" * (2 + len(DEPTHS)) + "|")
    for way, share in rivals:
        cells = [
            beside(store.of(way, depth, share), store.of("climb", depth, share)) if depth in list_depths(way) else ""
            for depth in DEPTHS
        ]
        lines.append(f"| {WAYS[way]} | {share:g} | {' | '.join(cells)} |")
    return lines if rivals else []


def list_ways(store: Store) -> list[tuple[str, float]]:
    """The ways and shares that all seeds that chose nothing have finished."""
    tried = {one.way for one in store.results}
    return [
        (way, share)
        for way in WAYS
        if way in tried
        for share in ((ALL_SHARES,) if way == "distil" else SHARES)
        if all(knows(store, way, depth, share) for depth in list_depths(way))
    ]


def list_depths(way: str) -> tuple[int, ...]:
    """Those that a way makes by itself."""
    return {"distil": DEPTHS[:-1], "star": DEPTHS[1:]}.get(way, DEPTHS)


def knows(store: Store, way: str, depth: int, share: float = ALL_SHARES) -> bool:
    """Whether all seeds that chose nothing have made it."""
    return len(store.of(way, depth, share)) == len(FINAL_SEEDS)


def spread(found: list[Result]) -> str:
    """Mean and standard deviation over seeds."""
    losses = [one.test for one in found]
    return f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}" if found else ""


def beside(found: list[Result], other: list[Result]) -> str:
    """Relative difference and its standard error over paired seeds."""
    less = [one.test / twin.test - 1 for one, twin in zip(found, other, strict=bool(found))]
    return f"{np.mean(less):+.2%} ± {np.std(less, ddof=1) / math.sqrt(len(less)):.2%}" if less else ""


if __name__ == "__main__":
    tyro.cli(main)
