"""Ways of adapting a trained network to 200 examples of new data, side by side: `esper.adapt` and its rivals.

    python benchmarks/adapt_arms.py FOLDER --tune        # rates, on a seed of their own: half an hour of one core
    python benchmarks/adapt_arms.py FOLDER               # ten seeds, an hour of one core each; may be stopped
    python benchmarks/adapt_arms.py FOLDER --table       # what is known so far

Hosts, shifts and data are those of adapt_gap.py, with other seeds. Every arm takes the same steps of Adam, with the one
of its rates that is best on the other shifts of the tuning seed. Two figures each: accuracy on the new data, and the
same after what was learned was scaled down, in tenths, until the loss on old data that nothing learned from is up by a
hundredth at most. Controllers learn from three quarters of the new data, and judge by the rest. Rivals normalise by the
statistics of their batches while they train, as whoever fine-tunes does; a frozen host by its own.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from adapt_gap import BATCH, EPOCHS, RAMP, Case, Data, accuracy, train_host
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
)
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import esper
from esper.experiments.process_pool import prepare_process
from esper.growth.model import GrowingModel
from esper.ui.output import say

CONSOLE = Console(width=200)
TUNING_SEED = 0
TUNING_EVERY = 2
"""Rates are tuned on every second shift."""
SEEDS = tuple(range(10, 20))
TOLERANCE = 0.01
SHARES = tuple(tenths / 10 for tenths in range(10, -1, -1))
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

    @torch.no_grad()
    def validate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        outputs = model(held_out.inputs)
        right = (outputs.argmax(1) == held_out.labels).float().mean()
        return float(F.cross_entropy(outputs, held_out.labels)), float(right)

    grower = esper.Grower(
        model, optimizer, controller, evaluate=validate, horizon=EPOCHS, train_size=len(rest.labels), seed=one.seed
    )
    generator = torch.Generator().manual_seed(one.seed)
    for _ in range(EPOCHS):
        total, batches = 0.0, torch.randperm(len(rest.labels), generator=generator).split(BATCH)
        model.train()
        for rows in batches:
            loss = F.cross_entropy(model(rest.inputs[rows]), rest.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss) / len(batches)
        grower.step(train_loss=total)
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


FINE, LAYER, SEED = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2, 1e-1, 3e-1), (1e-2, 3e-2, 1e-1)
OWN = (0.0,)
"""Of an arm that chooses its rate by itself."""
ARMS: dict[str, tuple[Way, Sequence[float]]] = {
    "full": (tune_fully, FINE),
    "replay": (lambda one: tune_fully(one, replayed=REPLAYED), FINE),
    "half replay": (lambda one: tune_fully(one, replayed=BATCH), FINE),
    "last layer": (lambda one: tune_part(one, "head"), LAYER),
    "unfrozen place": (lambda one: tune_part(one, FIXED[one.case.host][0]), LAYER),
    "largest gradient": (tune_largest, LAYER),
    "auto-rgn": (tune_by_gradients, LAYER),
    "layers, tried": (search_layers, OWN),
    "lora 4": (lambda one: tune_lora(one, 4), LAYER),
    "lora 16": (lambda one: tune_lora(one, 16), LAYER),
    "lora 16, half replay": (lambda one: tune_lora(one, 16, replayed=BATCH), LAYER),
    "lora, tried": (search_lora, OWN),
    "adalora": (tune_adalora, SEED),
    "fixed place": (lambda one: grow_all(one, dict([FIXED[one.case.host]])), SEED),
    "blocks": (lambda one: grow_all(one, dict.fromkeys(one.case.places["block_copy"], "block_copy")), SEED),
    "everywhere": (
        lambda one: grow_all(one, dict.fromkeys(one.case.places[BIG[one.case.host]], BIG[one.case.host])),
        SEED,
    ),
    "most promising": (grow_most_promising, ()),
    "rule look": (lambda one: grow_by_controller(one, "look"), ()),
    "policy esper": (lambda one: grow_by_controller(one, "esper"), ()),
    "esper.adapt": (adapt_by_trying, ()),
    "esper.adapt, source": (lambda one: adapt_by_trying(one, protect=True), ()),
}
"""With the rates to choose from; none: the rate of `LIKE`."""
LIKE = "fixed place"
"""Whose rate is that of all that looks for a place: they are too dear to be tuned."""
FREE, PROTECTING = "esper.adapt", "esper.adapt, source"
"""What the others are compared with: on new data, and where old data must not suffer."""
KINDS = ("input", "feature", "output")
LINEAR_ONLY = {"adalora": ("vit",)}
"""Hosts that an arm knows what to do with, if not all."""


@torch.no_grad()
def mean_loss(network: nn.Module, data: Data) -> float:
    network.eval()
    return float(F.cross_entropy(network(data.inputs), data.labels))


def judge(one: Setting, arm: Way) -> dict[str, float]:
    """What an arm reaches, and what it costs."""
    held = one.problem.held
    before, began = mean_loss(one.host, held), time.monotonic()
    made = arm(one)
    seconds = time.monotonic() - began
    found = {"new": accuracy(made.network, one.problem.test), "old": accuracy(made.network, held)}
    for share in SHARES:
        network = made.weigh(share)
        if mean_loss(network, held) <= before * (1 + TOLERANCE):
            break
    spent = {"parameters": made.learned, "flops": made.flops, "seconds": seconds}
    return {**found, "kept": accuracy(network, one.problem.test), "share": share, **spent}


def measure(
    folder: Path,
    case: Case,
    seed: int,
    rates: Callable[[str, str], Sequence[float]],
    arms: list[str],
    every: int = 1,
) -> None:
    """Every arm at ``rates(arm, shift)`` on every shift, or every second one and so on, that is not known yet."""
    path = folder / f"{case.host}-{seed}.jsonl"
    known = {record["shift"] for record in read(path)}
    host, learned = None, None
    for problem in islice(case.problems(seed), 0, None, every):
        if problem.shift in known:
            continue
        if host is None or learned is not problem.source:
            host, learned = train_host(case, problem, seed), problem.source
        found = {
            f"{name} @{rate}": judge(Setting(case, problem, host, rate, seed), ARMS[name][0])
            for name in arms
            if case.host in LINEAR_ONLY.get(name, (case.host,))
            for rate in rates(name, problem.shift)
        }
        before = accuracy(host, problem.test)
        with path.open("a") as file:
            file.write(
                json.dumps({"shift": problem.shift, "kind": problem.kind, "before": before, "found": found}) + "\n"
            )
        told = ", ".join(f"{name} {one['new']:.3f}" for name, one in found.items())
        say(CONSOLE, f"{case.host} {seed} {problem.shift}: {before:.3f}; {told}")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tuned_rate(folder: Path, case: Case) -> Callable[[str, str], Sequence[float]]:
    """For an arm and a shift the rate that is best on the other shifts of the tuning seed."""
    records = read(folder / f"{case.host}-{TUNING_SEED}.jsonl")

    def choose(arm: str, shift: str) -> Sequence[float]:
        name = arm if ARMS[arm][1] else LIKE
        rates = ARMS[name][1]
        if len(rates) == 1:
            return rates
        others = [record["found"] for record in records if record["shift"] != shift]
        if not others:
            raise SystemExit(f"no rates are known for {case.host}: say --tune before")
        return [max(rates, key=lambda rate: float(np.mean([found[f"{name} @{rate}"]["new"] for found in others])))]

    return choose


Row = tuple[str, str, dict[str, dict[str, float]]]
"""Host and shift, kind of shift, and what each arm came to with one seed."""


def show(folder: Path, hosts: Sequence[str]) -> None:
    """Means over shifts and seeds, and how far `esper.adapt` is ahead of each arm: standard errors over shifts."""
    rows: list[Row] = []
    seeds = set[str]()
    for case in CASES:
        for path in sorted(folder.glob(f"{case.host}-*.jsonl")) if case.host in hosts else []:
            if (seed := path.stem.rpartition("-")[2]) != str(TUNING_SEED):
                seeds.add(seed)
                for record in read(path):
                    by_arm = {name.partition(" @")[0]: one for name, one in record["found"].items()}
                    rows.append((f"{case.host} {record['shift']}", record["kind"], by_arm))
    if not rows:
        raise SystemExit(f"{folder} has no results yet")
    say(CONSOLE, f"{len({row[0] for row in rows})} shifts, seeds {', '.join(sorted(seeds))}; accuracy in points")
    titles = ("arm", "new", *KINDS, FREE, "old", "within", PROTECTING, "parameters", "trainings", "seconds")
    table = Table(*titles, box=None)
    for name in ARMS:
        here = [row for row in rows if name in row[2]]
        if here:
            table.add_row(name, *_describe(name, here))
    CONSOLE.print(table)
    for case in CASES:
        here = [row for row in rows if row[0].startswith(case.host)]
        told = (f"{name} {_mean(here, name, 'new')}" for name in ARMS if here and name in here[0][2])
        say(CONSOLE, f"{case.host}: {', '.join(told)}")


def _describe(name: str, rows: list[Row]) -> Iterator[str]:
    yield _mean(rows, name, "new")
    for kind in KINDS:
        yield _mean([row for row in rows if row[1] == kind], name, "new")
    yield compare(rows, FREE, name, "new")
    yield _mean(rows, name, "old")
    yield _mean(rows, name, "kept")
    yield compare(rows, PROTECTING, name, "kept")
    for key, digits in (("parameters", 0), ("flops", 0), ("seconds", 1)):
        yield f"{np.mean([row[2][name][key] for row in rows]):,.{digits}f}"


def _mean(rows: list[Row], name: str, key: str) -> str:
    return f"{100 * np.mean([row[2][name][key] for row in rows]):.1f}"


def compare(rows: list[Row], better: str, name: str, key: str) -> str:
    """What ``better`` is ahead of another arm, in points: mean over shifts ± its standard error."""
    by_shift = defaultdict[str, list[float]](list)
    for shift, _, found in rows:
        by_shift[shift].append(found[better][key] - found[name][key])
    means = 100 * np.array([np.mean(differences) for differences in by_shift.values()])
    return f"{means.mean():+.1f} ± {means.std(ddof=1) / len(means) ** 0.5:.1f}" if len(means) > 1 else ""


def main(
    folder: tyro.conf.Positional[Path],
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="Of hosts, data and adaptations.")] = SEEDS,
    hosts: tuple[str, ...] = ("conv1d", "resnet", "vit"),
    tune: bool = False,
    table: bool = False,
) -> None:
    """Measure what is not known yet, and print the table."""
    warnings.simplefilter("ignore")
    prepare_process()
    folder.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if case.host in hosts]
    if tune:
        several = [name for name, (_, rates) in ARMS.items() if len(rates) > 1]
        for case in cases:
            measure(folder, case, TUNING_SEED, lambda name, _: ARMS[name][1], several, TUNING_EVERY)
    elif not table:
        for seed in seeds:
            for case in cases:
                measure(folder, case, seed, tuned_rate(folder, case), list(ARMS))
    if not tune:
        show(folder, hosts)


if __name__ == "__main__":
    tyro.cli(main)
