"""Several sizes of a language model from one training that grows: what do they lose, and what do they save?

    python benchmarks/ladder.py FOLDER alone        # each depth by itself: learning rates, then five seeds
    python benchmarks/ladder.py FOLDER climb        # `esper.ladder`, which doubles its depth: shares, then five seeds
    python benchmarks/ladder.py FOLDER joint        # one network with an exit at each depth, for the ladder's FLOPs
    python benchmarks/ladder.py FOLDER star         # each depth from the first one at once: times 2, 4 and 8
    python benchmarks/ladder.py FOLDER distil       # the deepest, pruned and distilled
    python benchmarks/ladder.py FOLDER other        # the first three on another text, with the same settings
    python benchmarks/ladder.py FOLDER time         # seconds of the ladder and of all sizes alone, in turns
    python benchmarks/ladder.py FOLDER table

Another width or budget belongs in another folder: ``--width 32 --steps 9600`` with each of these. Started several times
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
Seed 0 chooses by validation loss: learning rates, and the ladder's share, the least by which all rungs are within 1%
of what they are alone, or else the greatest. Seeds 1 to 5 and the text's last tenth, which nothing else reads, are
reported. What was killed goes on: each result is kept as soon as it is there, and a ladder from its last checkpoint.
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
from esper.ladders.flops import count_forward

DEPTHS = (1, 2, 4, 8)
STEPS, DECAY = 4800, 0.2
"""Of each network alone, and the share of them at falling rates."""
RATES, SHARES = (6e-3, 12e-3, 24e-3, 48e-3), (0.2, 0.35, 0.5)
"""What seed 0 chooses from: learning rates at the width `WIDTH`, which fall as 1 / width (Yang et al. 2022, arXiv
2203.03466); shares of the steps that the ladder spends at each depth but the first, the decay left out."""
DISTILLED, DISTILLING = 0.8, tuple(itertools.product((12e-3, 24e-3, 48e-3), (0.25, 0.5, 1.0)))
"""Share of the FLOPs of all sizes alone that the deepest network and those distilled of it take together; learning
rates and weights of the teacher's answers in the loss, to choose from."""
JOINT = tuple(itertools.product((6e-3, 12e-3, 24e-3), (0.0, 0.1)))
"""Learning rates and layer dropout of the network with exits, to choose from."""
TURNS = 3
"""How often the time of both ways is measured."""
ENOUGH = 0.01
"""By which share of its loss a rung may be above the network of its size that was trained alone."""
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
    """What seed 0 chooses: a rate; a share; a rate and a weight, or layer dropout."""
    seed: int
    validation: float
    test: float
    flops: float
    """Of its own training; of the ladder, of all up to here; of a star, of its own part; of exits, of all of them; of
    what is distilled, with its part of the answers, and without the teacher's training."""


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
        self._chosen = ResultFile(folder / "ladder.jsonl", Result)
        other = ResultFile(folder / f"ladder-{text}.jsonl", Result)
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

    def network_path(self, depth: int, setting: Setting, seed: int) -> Path:
        """Of a network that was trained alone."""
        return self.folder / f"{self.file.path.stem.replace('ladder', 'alone')}-{depth}-{setting[0]:g}-{seed}.pt"

    def of(self, way: str, depth: int, setting: Setting | None = None) -> list[Result]:
        """Those of the seeds that chose nothing, in the order of seeds."""
        setting = self.best(way, depth) if setting is None else setting
        known = [one for one in self.results if (one.way, one.depth, one.setting) == (way, depth, setting)]
        return sorted((one for one in known if one.seed != CHOOSING), key=lambda one: one.seed)

    def best(self, way: str, depth: int) -> Setting:
        """The setting with the least validation loss of the seed that chooses, of exits in the mean; of the ladder, the
        least share by which every rung is within `ENOUGH` of what it is alone, or else the greatest. A star has it too.
        """
        if way == "star":
            return self.best("climb", DEPTHS[-1])
        known = [one for one in self.choices if (one.way, one.depth) == (way, depth)]
        if not known:
            raise SystemExit(f"nothing is known of step {way} yet: run that before")
        if way == "joint":
            settings = {one.setting for one in known}
            return min(settings, key=lambda setting: (self._mean(way, setting), setting))
        if way != "climb":
            return min(known, key=lambda one: one.validation).setting
        shares = sorted(one.setting for one in known)
        return next(filter(self.suffices, shares), shares[-1])

    def suffices(self, share: Setting) -> bool:
        """Whether every rung is within `ENOUGH` of what it is alone, for the seed that chooses."""
        return self._worst(share) <= ENOUGH

    def _mean(self, way: str, setting: Setting) -> float:
        """Of validation losses over depths, for the seed that chooses."""
        found = [one.validation for one in self.choices if (one.way, one.setting) == (way, setting)]
        return sum(found) / len(found)

    def _worst(self, share: Setting) -> float:
        """By how much the worst rung is above what it is alone, for the seed that chooses."""
        found = {(one.way, one.depth, one.setting): one.validation for one in self.choices}
        return max(
            found["climb", depth, share] / found["alone", depth, self.best("alone", depth)] - 1 for depth in DEPTHS
        )


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
    """As `train_by_itself`, and kept."""
    network, flops = train_by_itself(store, depth, setting, seed)
    torch.save(network.state_dict(), store.network_path(depth, setting, seed))
    store.add(Result("alone", depth, setting, seed, *judge(store, network), flops))


def train_by_itself(store: Store, depth: int, setting: Setting, seed: int) -> tuple[Gpt, float]:
    """A network, and its FLOPs: warm-up, stable, decay."""
    network, minibatches = begin(store, seed, depth)
    model = attach(network)
    optimizer, spending = make_optimizer(model, *setting), esper.Spending(model)
    scheduler = LambdaLR(optimizer, lambda step: esper.warmup_stable_decay(step / store.steps, decay=DECAY))
    for _ in range(store.steps):
        learn(model, optimizer, next(minibatches))
        scheduler.step()
    return network, spending.flops


def climb(store: Store, setting: Setting, seed: int) -> None:
    """One training with a branch at each depth, which is decayed; the rates are those that are best alone."""
    judged = train_ladder(store, DEPTHS, setting, seed)
    store.add(*(Result("climb", depth, setting, seed, *losses, flops) for depth, (losses, flops) in judged.items()))


def train_ladder(
    store: Store, depths: Sequence[int], setting: Setting, seed: int
) -> dict[int, tuple[tuple[float, float], float]]:
    """By depth, validation and test loss, and the FLOPs up to there."""
    (share,), (rate,) = setting, store.best("alone", depths[0])
    network, _ = begin(store, seed, depths[0])
    minibatches = Stream(store.load_text().train, seed)
    folder = store.folder / f"rungs-{store.text}-{depths[-1]}-{share:g}-{seed}"
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
        folder=folder,
    )
    judged: dict[int, tuple[tuple[float, float], float]] = {}
    for rung in made.rungs:
        plain, _ = begin(store, seed, rung.depth)
        plain.load_state_dict(load_file(rung.path / "model.safetensors"))
        judged[rung.depth] = (judge(store, plain), rung.flops)
    shutil.rmtree(folder)
    return judged


def train_star(store: Store, setting: Setting, seed: int) -> None:
    """A ladder of two rungs for each depth, whose first one is the same, and counts once."""
    for depth in DEPTHS[1:]:
        judged = train_ladder(store, (DEPTHS[0], depth), setting, seed)
        (losses, flops), (_, first) = judged[depth], judged[DEPTHS[0]]
        store.add(Result("star", depth, setting, seed, *losses, flops - first))


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
    rate, dropout = setting
    network, minibatches = begin(store, seed, DEPTHS[-1])
    exits = Exits(network, dropout, seed)
    example = torch.zeros(BATCH, WINDOW, dtype=torch.int64, device=store.device)
    one, two = (count_forward(begin(store, seed, depth)[0], example)[0] for depth in (1, 2))
    cost = 3 * (count_forward(exits.eval(), example)[0] - dropout * DEPTHS[-1] * (two - one))
    steps = round(find_ladder_flops(store) / cost)
    optimizer = make_adamw(exits.train().parameters(), rate)
    for step in range(steps):
        set_rate(optimizer, rate * esper.warmup_stable_decay(step / steps, decay=DECAY))
        inputs, targets = next(minibatches)
        logits = exits(inputs)
        loss = F.cross_entropy(logits.flatten(0, 2), targets.flatten().repeat(len(DEPTHS)))
        step_down(exits, optimizer, loss)
    for index, depth in enumerate(DEPTHS):
        store.add(Result("joint", depth, setting, seed, *judge(store, Exit(exits, index)), steps * cost))


def find_ladder_flops(store: Store) -> float:
    """Of the ladder with the share that was chosen; it is the same for all seeds."""
    share = store.best("climb", DEPTHS[-1])
    found = [one.flops for one in (*store.results, *store.choices) if one.way == "climb" and one.setting == share]
    return max(found)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class Student:
    """Some blocks of the deepest network, which learn from its answers and from the text."""

    def __init__(self, store: Store, teacher: Gpt, depth: int, setting: Setting) -> None:
        pruned = (prune(teacher, depth, last) for last in (False, True))
        self.network = min(pruned, key=lambda one: judge(store, one)[0]).train()
        self.model, (self.rate, self.weight) = attach(self.network), setting
        self.spending, self.optimizer = esper.Spending(self.model), make_optimizer(self.model, self.rate)

    def learn(self, inputs: Tensor, targets: Tensor, answers: Tensor, share: float) -> None:
        """A step, at a rate by the share of the training that is over; ``answers`` are log-probabilities."""
        set_rate(self.optimizer, self.rate * esper.warmup_stable_decay(share, warmup=0.1, decay=0.9))
        logits = self.model(inputs).flatten(0, 1)
        by_teacher = F.kl_div(logits.log_softmax(-1), answers, reduction="batchmean", log_target=True)
        by_text = F.cross_entropy(logits, targets.flatten())
        step_down(self.model, self.optimizer, self.weight * by_teacher + (1 - self.weight) * by_text)


def distil(store: Store, chosen: Mapping[int, Setting], seed: int) -> None:
    """All sizes but the largest, by depth, from the same answers of the largest, which are paid for once."""
    teacher, minibatches = begin(store, seed, DEPTHS[-1])
    teacher.load_state_dict(torch.load(store.network_path(DEPTHS[-1], store.best("alone", DEPTHS[-1]), seed)))
    students = {depth: Student(store, teacher, depth, setting) for depth, setting in chosen.items()}
    watched = attach(teacher.eval())
    answering, steps = esper.Spending(watched), afford(store)
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
    store: Store, way: str, depths: tuple[int, ...], settings: list[Setting], train: Callable[[int, Setting, int], None]
) -> None:
    """What is not known yet: on the text that chooses all settings by its seed; the best one by the others."""

    def run_missing(tasks: list[tuple[int, Setting, int]]) -> None:
        store.file.run_missing(tasks, lambda task: store.knows(way, *task), train_one)

    def train_one(task: tuple[int, Setting, int]) -> None:
        train(*task)
        depth, setting, seed = task
        values = ", ".join(f"{value:g}" for value in setting)
        print_line(Console(), f"{store.text}: {way}, depth {depth}, {values}, seed {seed}: done")

    # The deepest first, as they take longest.
    choosing = [(depth, setting, CHOOSING) for depth in reversed(depths) for setting in settings]
    if store.text == CHOOSING_TEXT:
        run_missing(choosing)
    run_missing([(depth, store.best(way, depth), seed) for depth in reversed(depths) for seed in FINAL_SEEDS])
    # What other shares cost and lose is a table of its own.
    if store.text == CHOOSING_TEXT and way == "climb":
        run_missing([(depth, setting, seed) for depth in depths for setting in settings for seed in FINAL_SEEDS])


def main(
    folder: tyro.conf.Positional[Path],
    step: tyro.conf.Positional[Step],
    steps: int | None = None,
    width: int = WIDTH,
    device: str = "cpu",
) -> None:
    """Run a step of the experiment, or what is missing of it; `table` prints what is known."""
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
    rates = [(rate * WIDTH / store.width,) for rate in RATES]
    run(store, "alone", DEPTHS, rates, partial(train_alone, store))


def run_climb(store: Store) -> None:
    shares = [(share,) for share in SHARES]
    run(store, "climb", DEPTHS[-1:], shares, lambda _, share, seed: climb(store, share, seed))


def run_joint(store: Store) -> None:
    settings = [(rate * WIDTH / store.width, dropout) for rate, dropout in JOINT]
    run(store, "joint", DEPTHS[-1:], settings, lambda _, setting, seed: train_joint(store, setting, seed))


def run_star(store: Store) -> None:
    run(store, "star", DEPTHS[-1:], [], lambda _, share, seed: train_star(store, share, seed))


def measure_time(store: Store) -> None:
    """Seconds of training of the ladder and of all sizes alone, in turns, with seed 0 and the settings chosen."""
    share, rows = store.best("climb", DEPTHS[-1]), list[dict[str, float]]()
    for _ in range(TURNS):
        row = dict[str, float]()
        began = time.perf_counter()
        for depth in DEPTHS:
            train_by_itself(store, depth, store.best("alone", depth), CHOOSING)
        row["alone"] = time.perf_counter() - began
        began = time.perf_counter()
        train_ladder(store, DEPTHS, share, CHOOSING)
        row["ladder"] = time.perf_counter() - began
        rows.append(row)
        less = 1 - row["ladder"] / row["alone"]
        print_line(Console(), f"alone {row['alone']:.0f} s, ladder {row['ladder']:.0f} s, {less:.0%} less")
    (store.folder / "time.json").write_text(json.dumps(rows) + "\n")


def run_distil(store: Store) -> None:
    """All settings with the seed that chooses, and for each depth its best one with the others."""

    def run_missing(tasks: list[tuple[dict[int, Setting], int]]) -> None:
        store.file.run_missing(tasks, is_known, distil_one)

    def is_known(task: tuple[dict[int, Setting], int]) -> bool:
        return all(store.knows("distil", depth, setting, task[1]) for depth, setting in task[0].items())

    def distil_one(task: tuple[dict[int, Setting], int]) -> None:
        distil(store, *task)
        print_line(Console(), f"distil, seed {task[1]}: done")

    settings = [(rate * WIDTH / store.width, weight) for rate, weight in DISTILLING]
    run_missing([(dict.fromkeys(DEPTHS[:-1], setting), CHOOSING) for setting in settings])
    run_missing([({depth: store.best("distil", depth) for depth in DEPTHS[:-1]}, seed) for seed in FINAL_SEEDS])


def show(store: Store, console: Console) -> None:
    """Test losses beside those of the twins that trained alone and of the ladder, and what all sizes cost together."""
    if not knows(store, "alone"):
        print_line(console, f"{store.text}: not all depths have been trained alone by all seeds yet")
        return
    known = {way for way in WAYS if knows(store, way)}
    for line in (*tabulate(store), "", *tabulate_shares(store), ""):
        print_line(console, line)
    alone = sum(store.of("alone", depth)[0].flops for depth in DEPTHS)
    print_line(console, f"{store.text}: FLOPs of all four sizes: alone {alone:.3g}")
    first, deepest = (store.of("alone", depth)[0].flops for depth in (DEPTHS[0], DEPTHS[-1]))
    if "climb" in known:
        ladder = store.of("climb", DEPTHS[-1])[0].flops
        print_line(console, f"the ladder {ladder:.3g}, {1 - ladder / alone:.0%} less")
    if "joint" in known:
        print_line(console, f"joint exits {store.of('joint', DEPTHS[-1])[0].flops:.3g}")
    if "star" in known:
        print_line(console, f"the star {first + sum(store.of('star', depth)[0].flops for depth in DEPTHS[1:]):.3g}")
    if "distil" in known:
        distilled = deepest + sum(store.of("distil", depth)[0].flops for depth in DEPTHS[:-1])
        print_line(console, f"the deepest and what was distilled of it {distilled:.3g}")
    for way in ("alone", "climb", "joint", "distil"):
        for one in sorted(store.results, key=lambda one: (one.depth, one.validation)):
            if one.way == way and one.seed == CHOOSING:
                chosen = ", ".join(f"{value:g}" for value in one.setting)
                print_line(console, f"{way}, depth {one.depth}, {chosen}: validation {one.validation:.4f}")


def tabulate(store: Store) -> list[str]:
    """Lines of a Markdown table: by depth and way, means and deviations, beside those alone and those of the ladder."""
    lines = ["| blocks | way | test loss | beside alone | beside the ladder |", "|---|---|---|---|---|"]
    known = {way: title for way, title in WAYS.items() if knows(store, way)}
    for depth in DEPTHS:
        alone = store.of("alone", depth)
        climbed = store.of("climb", depth, store.best("climb", DEPTHS[-1])) if "climb" in known else []
        lines.append(f"| {depth} | alone | {spread(alone)} | | {beside(alone, climbed) if climbed else ''} |")
        for way, title in known.items():
            if depth in list_depths(way):
                found = climbed if way == "climb" else store.of(way, depth)
                ladder = beside(found, climbed) if climbed and way != "climb" else ""
                lines.append(f"| | {title} | {spread(found)} | {beside(found, alone)} | {ladder} |")
    return lines


def tabulate_shares(store: Store) -> list[str]:
    """Lines of a Markdown table: what ladders of every share lose beside networks alone, and what they save."""
    total = sum(store.of("alone", depth)[0].flops for depth in DEPTHS)
    lines = [f"| share | {' | '.join(f'{depth} blocks' for depth in DEPTHS)} | FLOPs of all | saved |"]
    lines.append("|---" * (3 + len(DEPTHS)) + "|")
    for share in SHARES:
        found = {depth: store.of("climb", depth, (share,)) for depth in DEPTHS}
        if all(len(results) == len(FINAL_SEEDS) for results in found.values()):
            less = [beside(found[depth], store.of("alone", depth)) for depth in DEPTHS]
            flops = found[DEPTHS[-1]][0].flops
            lines.append(f"| {share:g} | {' | '.join(less)} | {flops:.3g} | {1 - flops / total:.0%} |")
    return lines


def list_depths(way: str) -> tuple[int, ...]:
    """Those that a way makes by itself."""
    return {"distil": DEPTHS[:-1], "star": DEPTHS[1:]}.get(way, DEPTHS)


def knows(store: Store, way: str) -> bool:
    """Whether all seeds that chose nothing have made all there is to show of it."""
    depths = list_depths(way)
    if not any(one.way == way for one in store.results):
        return False
    settings = {depth: store.best(way, DEPTHS[-1] if way == "climb" else depth) for depth in depths}
    return all(len(store.of(way, depth, setting)) == len(FINAL_SEEDS) for depth, setting in settings.items())


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
