"""Ways of adapting a trained network to 200 examples of new data, side by side: `esper.adapt` and its rivals.

    python benchmarks/adapt_arms.py FOLDER --tune        # rates, on a seed of their own: half an hour of one core
    python benchmarks/adapt_arms.py FOLDER               # ten seeds, an hour of one core each; may be stopped
    python benchmarks/adapt_arms.py FOLDER --table       # what is known so far, as docs/adapt.md has it

Hosts, shifts and data are those of adapt_gap.py, with other seeds. Two figures each: accuracy on the new data, and the
same after what was learned was scaled down until the loss on old data that nothing learned from is up by a hundredth at
most. Every arm takes the same steps of Adam, for each of these figures with the one of its rates that gives the best on
the other shifts of the tuning seed; what looks for a place takes the rate at which the best fixed place does best on
new data. Growers learn from three quarters of the new data, in as many steps, and judge by the rest. Rivals normalise
by the statistics of their batches while they train, as whoever fine-tunes does, unless they are said to be at rest; a
frozen host by its own.

What is known is kept, a JSON line for each arm and shift: `benchmarks/results/adapt_arms` is what docs/adapt.md tells.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from adapt_gap import BATCH, EPOCHS, RAMP, Case, Data, Problem, accuracy, make_folder, train_host
from adapt_gap import CASES as ALL_CASES
from adapt_rivals import (
    REPLAYED,
    Adapted,
    Setting,
    Way,
    fit,
    search_layers,
    search_lora,
    tune_adalora,
    tune_by_gradients,
    tune_fully,
    tune_largest,
    tune_lora,
    tune_part,
    tune_statistics,
)
from rich.console import Console
from scipy import stats
from torch import nn
from torch.nn import functional as F

import esper
from esper.dash.output import print_line
from esper.errors import DivergedError
from esper.growth.model import GrowingModel
from esper.train.workers import prepare_process

CONSOLE = Console(width=400)
DATA = {"resnet": "digits", "vit": "digits", "conv1d": "mnist1d"}
"""What hosts learn."""
SHIFTS = 12
"""Of each host."""
TUNING_SEED = 0
TUNING_EVERY = 2
"""Rates are tuned on every second shift."""
SEEDS = tuple(range(10, 20))
TOLERANCE = 0.01
DIGITS = 5
"""Of figures that are kept."""
PARTS = 10
"""Of what was learned, by which it is scaled down, and of each of these, by which it then is less so."""
FIXED = {"resnet": ("layer2", "conv3x3"), "vit": ("block1", "block_copy"), "conv1d": ("layer3", "conv3x3")}
"""The best single places of all shifts together, by adapt_gap.py, whose seeds are not these."""
CASES = [case for case in ALL_CASES if case.host in FIXED]
"""Rivals are told apart by the accuracy of one answer per example, so no language model is among them."""
BIG = {"resnet": "conv3x3", "vit": "mlp", "conv1d": "conv3x3"}
"""The kind that fills all its places in the arm `everywhere`."""
VALIDATION = 50
"""Of the new examples, for controllers that need some to judge by."""


def reweigh(model: GrowingModel) -> Callable[[float], nn.Module]:
    usual = {name: float(seed.alpha) for name, seed in model.seeds.items()}

    def weigh(share: float) -> nn.Module:
        for name, seed in model.seeds.items():
            seed.alpha.fill_(share * usual[name])
        return model

    return weigh


def attach_everything(one: Setting) -> GrowingModel:
    offers = defaultdict[str, list[str]](list)
    for blueprint, places in one.case.places.items():
        for place in places:
            offers[place].append(blueprint)
    return esper.attach(one.fresh, offers, one.problem.target.inputs[:2], freeze_host=True)


def grow_all(one: Setting, seeds: dict[str, str]) -> Adapted:
    """These blueprints in these slots, from the first step on; copies of blocks come in gradually."""
    model, generator = attach_everything(one), torch.Generator().manual_seed(one.seed)
    ramps = [slot for slot, blueprint in seeds.items() if blueprint == "block_copy"]
    for slot, blueprint in seeds.items():
        model.slots[slot].germinate(blueprint, generator, alpha=0.0 if slot in ramps else 1.0)

    def ramp(steps: int) -> None:
        for slot in ramps:
            model.slots[slot].set_alpha(min(steps / RAMP, 1.0))

    fit(model, model.parameter_groups(lr=one.rate), one.problem.target, one, after=ramp)
    return Adapted(model, reweigh(model), model.added_parameters)


def grow_most_promising(one: Setting) -> Adapted:
    """The single seed that `GrowingModel.look` finds most promising."""
    looked = attach_everything(one).look(
        lambda model, batch: F.cross_entropy(model(batch.inputs), batch.labels, reduction="none"),
        split(one.problem.target),
        seed=one.seed,
    )
    return grow_all(one, {looked.rows[0].slot: looked.rows[0].blueprint})


def grow_by_controller(one: Setting, controller: str) -> Adapted:
    """A grower that decides once per epoch, by a quarter of the new examples that nothing learns from."""
    model, data = attach_everything(one), one.problem.target
    held_out, rest = data.pick(slice(VALIDATION)), data.pick(slice(VALIDATION, None))
    optimizer = torch.optim.Adam(model.parameter_groups(lr=one.rate))
    epochs = EPOCHS * len(data.labels) // len(rest.labels)  # as many steps as all take

    @torch.no_grad()
    def validate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        outputs = model(held_out.inputs)
        right = (outputs.argmax(1) == held_out.labels).float().mean()
        return float(F.cross_entropy(outputs, held_out.labels)), float(right)

    grower = esper.Grower(
        model,
        optimizer,
        controller=controller,
        evaluate=validate,
        horizon=epochs,
        train_size=len(rest.labels),
        seed=one.seed,
    )
    generator = torch.Generator().manual_seed(one.seed)
    for _ in range(epochs):
        total, batches = 0.0, torch.randperm(len(rest.labels), generator=generator).split(BATCH)
        model.train()
        for rows in batches:
            loss = F.cross_entropy(model(rest.inputs[rows]), rest.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss) / len(batches)
        try:
            grower.step(train_loss=total)
        except DivergedError:  # once too often; the model is in its last good state
            break
    grower.finish()
    return Adapted(model, reweigh(model), model.added_parameters)


def adapt_by_trying(one: Setting, *, protect: bool = False) -> Adapted:
    model = attach_everything(one)
    report = esper.adapt(
        model,
        lambda model, batch: F.cross_entropy(model(batch.inputs), batch.labels),
        split(one.problem.target),
        score=lambda model, batch: (model(batch.inputs).argmax(1) == batch.labels).float().mean(),
        source=split(one.protected) if protect else None,
        tolerance=TOLERANCE if protect else None,
        optimizer=lambda groups: torch.optim.Adam(groups, one.rate),
        epochs=EPOCHS,
        seed=one.seed,
    )
    trainings = (2.0 if protect else 1.0) * (1 + len(report.trials))
    return Adapted(model, reweigh(model), model.added_parameters, trainings)


def split(data: Data) -> list[Data]:
    return [data.pick(rows) for rows in torch.arange(len(data.labels)).split(BATCH)]


HOST_NAMES = tuple(FIXED)


@dataclass(frozen=True)
class Arm:
    """A way of adapting, and what there is to choose from."""

    title: str
    """In docs/adapt.md."""
    way: Way
    rates: Sequence[float] = ()
    """Of Adam, to choose from; none: the rate of `LIKE`."""
    hosts: tuple[str, ...] = HOST_NAMES
    """That it knows what to do with."""


FINE, PART = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Of what changes all that there is, and of what changes a part, or adds one."""
OWN = (0.0,)
"""Of an arm that chooses its rate by itself, or learns nothing."""
LIKE = "fixed place"
"""Whose rate is that of all that looks for a place: they are too dear to be tuned."""
FREE, PROTECTING = "esper.adapt", "esper.adapt, source"
"""What the others are compared with: on new data, and where old data must not suffer."""
NORMALISED = ("resnet",)
"""Hosts that normalise by running statistics."""
ARMS = {
    "host": Arm("the host as it is", lambda one: Adapted(one.host, lambda _: one.host, 0, 0.0), OWN),
    "statistics": Arm("its statistics of the new data alone (resnet alone)", tune_statistics, OWN, NORMALISED),
    "full": Arm("full fine-tuning", tune_fully, FINE),
    "replay": Arm("the same with 5% replay", lambda one: tune_fully(one, replayed=REPLAYED), FINE),
    "half replay": Arm("the same, half of it replay", lambda one: tune_fully(one, replayed=BATCH), FINE),
    "last layer": Arm("last layer", lambda one: tune_part(one, "head"), PART),
    "unfrozen place": Arm(
        "one existing layer, where the best fixed place is",
        lambda one: tune_part(one, FIXED[one.case.host][0]),
        PART,
    ),
    "largest gradient": Arm("layer of the largest relative gradient", tune_largest, PART),
    "auto-rgn": Arm("Auto-RGN", tune_by_gradients, PART),
    "layers, tried": Arm("**each layer, and all, by trying** (surgical fine-tuning)", search_layers, OWN),
    "lora 4": Arm("LoRA everywhere, rank 4 (PEFT)", lambda one: tune_lora(one, 4), PART),
    "lora 16": Arm("the same, rank 16", lambda one: tune_lora(one, 16), PART),
    "lora 16, half replay": Arm("the same, half of it replay", lambda one: tune_lora(one, 16, replayed=BATCH), PART),
    "lora 16, at rest": Arm(
        "the same, rank 16, statistics at rest (resnet alone)",
        lambda one: tune_lora(one, 16, at_rest=True),
        PART,
        NORMALISED,
    ),
    "lora, tried": Arm("LoRA, rank and rate by trying", search_lora, OWN),
    "adalora": Arm("AdaLoRA (PEFT; vit alone)", tune_adalora, PART, ("vit",)),
    LIKE: Arm("best fixed place", lambda one: grow_all(one, dict([FIXED[one.case.host]])), PART),
    "blocks": Arm(
        "a copy behind every block",
        lambda one: grow_all(one, dict.fromkeys(one.case.places["block_copy"], "block_copy")),
        PART,
    ),
    "everywhere": Arm(
        "one kind of seed in all its places",
        lambda one: grow_all(one, dict.fromkeys(one.case.places[BIG[one.case.host]], BIG[one.case.host])),
        PART,
    ),
    "most promising": Arm("the most promising single seed", grow_most_promising),
    "rule look": Arm("`Grower`, the rule that looks", lambda one: grow_by_controller(one, "look")),
    FREE: Arm("**`esper.adapt`**", adapt_by_trying),
    PROTECTING: Arm("`esper.adapt(source=...)`", lambda one: adapt_by_trying(one, protect=True)),
}
NEW, KEPT = "new", "kept"
"""What arms are judged by, and rates chosen: figures of a `Result`."""
KINDS = ("input", "feature", "output")
ALLOWING = ("input", "feature")
"""Kinds of shifts of which new data can be learned while old ones are remembered."""


@dataclass(frozen=True)
class Result:
    """What an arm came to on one shift, by one seed: accuracies, and what it costs."""

    shift: str
    kind: str
    arm: str
    rate: float
    new: float
    old: float
    kept: float
    """On new data, once so much is scaled down that the loss on old data is up by `TOLERANCE` at most."""
    share: float
    """Of what was learned, that is left then."""
    parameters: int
    trainings: float


@torch.no_grad()
def mean_loss(network: nn.Module, data: Data) -> float:
    network.eval()
    return float(F.cross_entropy(network(data.inputs), data.labels))


def find_share(holds: Callable[[float], bool]) -> float:
    """The greatest share at which it holds: of tenths, and then of the hundredths above; 0, if it does at none."""
    tenths = next((tenth for tenth in range(PARTS, 0, -1) if holds(tenth / PARTS)), 0)
    if tenths == PARTS:
        return 1.0
    finer = range(PARTS * (tenths + 1) - 1, PARTS * tenths, -1)
    return next((part for part in finer if holds(part / PARTS**2)), PARTS * tenths) / PARTS**2


def judge(one: Setting, name: str) -> Result:
    """Let an arm adapt the host."""
    problem, before = one.problem, mean_loss(one.host, one.problem.held)
    made = ARMS[name].way(one)
    new, old = accuracy(made.network, problem.test), accuracy(made.network, problem.held)
    share = find_share(lambda share: mean_loss(made.weigh(share), problem.held) <= before * (1 + TOLERANCE))
    kept = accuracy(made.weigh(share), problem.test)
    figures = [round(figure, DIGITS) for figure in (new, old, kept)]
    return Result(problem.shift, problem.kind, name, one.rate, *figures, share, made.learned, made.trainings)


def measure(
    folder: Path,
    case: Case,
    seed: int,
    rates: Callable[[str, Problem], Sequence[float]],
    arms: Sequence[str],
    every: int = 1,
) -> None:
    """Every arm at ``rates(arm, problem)`` on every shift, or every second one and so on, that is not known yet."""
    path = folder / f"{case.host}-{seed}.jsonl"
    known = {(result.shift, result.arm, result.rate) for result in read(path)}
    host, learned = None, None
    for problem in islice(case.problems(seed), 0, None, every):
        wanted = [(name, rate) for name in arms if case.host in ARMS[name].hosts for rate in rates(name, problem)]
        missing = [(name, rate) for name, rate in wanted if (problem.shift, name, rate) not in known]
        if missing and (host is None or learned is not problem.source):
            host, learned = train_host(case, problem, seed), problem.source
        for name, rate in missing:
            assert host is not None
            result = judge(Setting(case, problem, host, rate, seed), name)
            with path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        if missing:
            print_line(CONSOLE, f"{case.host}, seed {seed}, {problem.shift}: {len(missing)} ways measured")


def read(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


Choice = Callable[[str, str, str], float]
"""Of a rate, for an arm, a shift, and what the arm is judged by."""


def tuned_rate(folder: Path, host: str) -> Choice:
    """The rate that is best on the other shifts of the tuning seed, as far as the figure is told of them."""
    results = read(folder / f"{host}-{TUNING_SEED}.jsonl")

    def choose(arm: str, shift: str, figure: str) -> float:
        name, figure = (arm, figure) if ARMS[arm].rates else (LIKE, NEW)
        rates = ARMS[name].rates
        if len(rates) == 1:
            return rates[0]
        found = {(one.shift, one.rate): one for one in results if one.arm == name}
        tuned = {tried for tried, _ in found if all((tried, rate) in found for rate in rates)}
        if len(tuned) < SHIFTS // TUNING_EVERY:
            raise SystemExit(f"{name} on {host}: rates are known on {len(tuned)} shifts only: say --tune before")
        others = [tried for tried in tuned if tried != shift and is_told(figure, found[tried, rates[0]].kind)]
        return max(
            rates, key=lambda rate: float(np.mean([getattr(found[tried, rate], figure) for tried in sorted(others)]))
        )

    return choose


def is_told(figure: str, kind: str) -> bool:
    """Whether it is, of shifts of that kind."""
    return figure != KEPT or kind in ALLOWING


POINTS = "{:.1%}"
Cell = tuple[str, str]
"""A host, and one of its shifts."""
Cells = dict[Cell, dict[int, Result]]
"""By host and shift, then by seed."""
Table = dict[str, Cells]
"""By arm."""


def collect(folder: Path, hosts: Sequence[str], seeds: Sequence[int], figure: str) -> Table:
    """All that is known of these, at the rates that are chosen by that figure, on shifts of which it is told."""
    table: Table = {name: {} for name in ARMS}
    for host in hosts:
        choose = tuned_rate(folder, host)
        for seed in seeds:
            for one in read(folder / f"{host}-{seed}.jsonl"):
                if is_told(figure, one.kind) and one.rate == choose(one.arm, one.shift, figure):
                    table[one.arm].setdefault((host, one.shift), {})[seed] = one
    return table


def show(
    folder: Path, hosts: Sequence[str], arms: Sequence[str] = tuple(ARMS), seeds: Sequence[int] = SEEDS
) -> tuple[str, str]:
    """By how many seeds all is known, and a table of markdown: means over seeds, then over shifts, and how far
    `esper.adapt` is ahead.

    An arm that lacks a shift of a host that others know has no mean over them, and nothing is ahead of it. What old
    data allow is told of shifts of inputs and features: where labels changed, old data contradict the new ones.
    """
    table, careful = (collect(folder, hosts, seeds, figure) for figure in (NEW, KEPT))
    rows = {name: cells for name, cells in table.items() if name in arms and cells}
    if not rows:
        raise SystemExit(f"{folder} has no results of these yet")
    everywhere = {cell for cells in rows.values() for cell in cells}
    allowed = {cell for cells in rows.values() for cell in cells if is_told(KEPT, kind_of(cells[cell]))}
    by_host = hosts if len(hosts) > 1 else ()
    protected = [] if allowed - careful[PROTECTING].keys() else ["`source` is ahead by"]
    titles = ["way", "new data", *by_host, *KINDS, "`esper.adapt` is ahead by", "old data"]
    titles += ["new, old loss +1% at most", *protected, "parameters", "trainings"]
    lines = [titles, ["---"] * len(titles)]
    for name, cells in rows.items():
        whole = list(cells.values()) if cells.keys() == everywhere else []
        row = [ARMS[name].title, mean(whole, NEW)]
        row += [mean(list(find_host(cells, everywhere, host).values()), "new") for host in by_host]
        row += [mean([found for found in whole if kind_of(found) == kind], NEW) for kind in KINDS]
        row += [compare(table, FREE, name, NEW, everywhere), mean(whole, "old")]
        row += [mean([] if allowed - careful[name].keys() else list(careful[name].values()), KEPT)]
        row += [compare(careful, PROTECTING, name, KEPT, allowed) for _ in protected]
        row += [mean(whole, "parameters", "{:,.0f}"), mean(whole, "trainings", "{:.0f}")]
        lines.append(row)
    known = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return ", ".join(count_seeds(rows, everywhere, host) for host in hosts), known


def find_host(cells: Cells, everywhere: set[Cell], host: str) -> Cells:
    """The shifts of one host; none, if one is missing."""
    found = {cell: one for cell, one in cells.items() if cell[0] == host}
    return found if found.keys() == {cell for cell in everywhere if cell[0] == host} else {}


def count_seeds(table: Table, everywhere: set[Cell], host: str) -> str:
    """By how many seeds each arm that is known on all shifts of a host is known there."""
    counts = {len(one) for cells in table.values() for one in find_host(cells, everywhere, host).values()}
    return f"{host}: {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds" if counts else f"{host}: none"


def kind_of(found: dict[int, Result]) -> str:
    """Of a shift."""
    return next(iter(found.values())).kind


def mean(cells: Sequence[dict[int, Result]], key: str, form: str = POINTS) -> str:
    """Over seeds, then over shifts; nothing, where there are none."""
    means = [float(np.mean([getattr(one, key) for one in found.values()])) for found in cells]
    return form.format(np.mean(means)).rstrip("%") if means else ""


def compare(table: Table, better: str, name: str, key: str, cells: set[Cell]) -> str:
    """What ``better`` is ahead of another arm on these shifts, in points: mean over shifts of paired seeds, and its
    interval of 95% by Student's t; nothing, if one of them lacks a shift.

    Hosts that learn the same data meet the same shifts: errors are clustered by data and shift (Liang and Zeger 1986,
    Biometrika 73).
    """
    units, differences = list[Cell](), list[float]()
    if name == better or cells - table[name].keys() or cells - table[better].keys():
        return ""
    for host, shift in cells:
        found, other = table[name][host, shift], table[better][host, shift]
        paired = [getattr(other[seed], key) - getattr(found[seed], key) for seed in found if seed in other]
        if paired:
            units.append((DATA[host], shift))
            differences.append(100 * float(np.mean(paired)))
    clusters = len(set(units))
    if clusters < 2:
        return ""
    sums, center = Counter[Cell](), float(np.mean(differences))
    for unit, difference in zip(units, differences, strict=True):
        sums[unit] += difference - center
    error = math.sqrt(clusters / (clusters - 1) * sum(one**2 for one in sums.values())) / len(differences)
    half = error * float(stats.t.ppf(0.975, clusters - 1))
    return f"{center:+.1f} ({center - half:+.1f} to {center + half:+.1f})"


def choose_rates(choose: Choice, arm: str, problem: Problem) -> list[float]:
    """One for all figures, or one for each; none for what only is to forget little, where that is not told."""
    figures = [figure for figure in ((KEPT,) if arm == PROTECTING else (NEW, KEPT)) if is_told(figure, problem.kind)]
    return sorted({choose(arm, problem.shift, figure) for figure in figures})


def main(
    folder: tyro.conf.Positional[Path],
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="Of hosts, data and adaptations.")] = SEEDS,
    hosts: tuple[str, ...] = HOST_NAMES,
    arms: tuple[str, ...] = tuple(ARMS),
    tune: bool = False,
    table: bool = False,
) -> None:
    """Measure what is not known yet, and print the table."""
    for given, known in ((hosts, HOST_NAMES), (arms, tuple(ARMS))):
        if strange := [name for name in given if name not in known]:
            raise SystemExit(f"there is no {strange[0]!r}: take of {', '.join(known)}")
    several = [name for name in arms if len(ARMS[name].rates) > 1]
    if tune and (table or not several):
        raise SystemExit("there is nothing to tune: say --tune without --table, and arms with several rates")
    if TUNING_SEED in seeds:
        raise SystemExit(f"seed {TUNING_SEED} chooses rates, and is not reported: take others")
    warnings.simplefilter("ignore")
    prepare_process()
    make_folder(folder)
    cases = [case for case in CASES if case.host in hosts]
    if tune:
        for case in cases:
            measure(folder, case, TUNING_SEED, lambda name, _: ARMS[name].rates, several, TUNING_EVERY)
        return
    if not table:
        for seed, case in itertools.product(seeds, cases):
            measure(folder, case, seed, partial(choose_rates, tuned_rate(folder, case.host)), arms)
    sys.stdout.write("\n".join(show(folder, hosts, arms, seeds)) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
