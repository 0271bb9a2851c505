"""Ways of adapting a trained network to 200 examples of new data, side by side: `esper.adapt` and its rivals.

    python benchmarks/adapt_arms.py FOLDER --tune        # rates, on a seed of their own: half an hour of one core
    python benchmarks/adapt_arms.py FOLDER               # an hour and a half of one core; may be stopped
    python benchmarks/adapt_arms.py FOLDER --table       # what is known so far

Hosts, shifts and data are those of adapt_gap.py, with other seeds. Every arm takes the same steps of Adam, with the one
of its rates that is best on the other shifts of the tuning seed. Two figures each: accuracy on the new data, and the
same after what was learned was scaled down, in tenths, until the loss on the old data is up by a hundredth at most.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import peft
import torch
import tyro
from adapt_gap import BATCH, CASES, EPOCHS, RAMP, Case, Data, Problem, accuracy, list_problems, train_host
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.experiments.process_pool import prepare_process
from esper.growth.model import GrowingModel
from esper.ui.output import say

CONSOLE = Console()
TUNING_SEED = 0
SEEDS = (10, 11, 12, 13, 14)
TOLERANCE = 0.01
PROTECTED = 300
"""Source examples whose loss may not rise."""
REPLAYED = 3
"""Source examples in a batch of replay: about 5%."""
SHARES = tuple(tenths / 10 for tenths in range(10, -1, -1))
FIXED = {"resnet": ("layer2", "conv3x3"), "vit": ("block1", "block_copy"), "conv1d": ("layer3", "conv3x3")}
"""The best single places of all shifts together, by adapt_gap.py, whose seeds are not these."""
GAP_RATE = 0.03
"""Of Adam, for what chooses places: the better one of adapt_gap.py for every host and kind."""
BIG = {"resnet": "conv3x3", "vit": "mlp", "conv1d": "conv3x3"}
"""The kind that fills all its places in the arm `everywhere`."""
VALIDATION = 50
"""Of the new examples, for controllers that need some to judge by."""


@dataclass(frozen=True)
class Setting:
    """What an arm adapts, and by which rate."""

    case: Case
    problem: Problem
    host: nn.Module
    rate: float
    seed: int

    @property
    def fresh(self) -> Any:
        """A copy of the host."""
        return copy.deepcopy(self.host)


@dataclass(frozen=True)
class Adapted:
    """What an arm made of the host, and how to have less of it."""

    network: nn.Module
    weigh: Callable[[float], nn.Module]
    """The network with that share, in [0, 1], of what it learned."""
    learned: int
    """Parameters that learned, or were added."""
    flops: float = 1.0
    """Of training, relative to one training of 120 steps; rough."""


def interpolate(host: nn.Module, network: nn.Module) -> Callable[[float], nn.Module]:
    old, new = host.state_dict(), network.state_dict()

    def weigh(share: float) -> nn.Module:
        mixed = copy.deepcopy(network)
        mixed.load_state_dict(
            {key: torch.lerp(old[key], new[key], share) if new[key].is_floating_point() else new[key] for key in new}
        )
        return mixed

    return weigh


def reweigh(model: GrowingModel) -> Callable[[float], nn.Module]:
    usual = {name: float(seed.alpha) for name, seed in model.seeds.items()}

    def weigh(share: float) -> nn.Module:
        for name, seed in model.seeds.items():
            seed.alpha.fill_(share * usual[name])
        return model

    return weigh


def fit(
    network: nn.Module,
    parameters: Iterable[Any],
    data: Data,
    one: Setting,
    *,
    replayed: Data | None = None,
    epoch: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Minibatches in random order; ``epoch`` is called before each epoch, ``after`` with the number of steps."""
    optimizer, generator = torch.optim.Adam(parameters, one.rate), torch.Generator().manual_seed(one.seed)
    steps = 0
    for _ in range(EPOCHS):
        epoch(optimizer)
        network.train()
        for rows in torch.randperm(len(data.labels), generator=generator).split(BATCH):
            batch = data.pick(rows)
            if replayed is not None:
                old = replayed.pick(torch.randint(len(replayed.labels), (REPLAYED,), generator=generator))
                batch = Data(torch.cat([batch.inputs, old.inputs]), torch.cat([batch.labels, old.labels]))
            optimizer.zero_grad()
            F.cross_entropy(network(batch.inputs), batch.labels).backward()
            optimizer.step()
            steps += 1
            after(steps)


def count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def tune_fully(one: Setting, *, replay: bool = False) -> Adapted:
    network = one.fresh
    fit(network, network.parameters(), one.problem.target, one, replayed=one.problem.source if replay else None)
    return Adapted(network, interpolate(one.host, network), count(network.parameters()))


def tune_part(one: Setting, part: str) -> Adapted:
    """Nothing learns but the submodule ``part``."""
    network = one.fresh
    network.requires_grad_(False)
    network.get_submodule(part).requires_grad_(True)
    learned = list(network.get_submodule(part).parameters())
    fit(network, learned, one.problem.target, one)
    return Adapted(network, interpolate(one.host, network), count(learned))


def find_ratios(network: nn.Module, data: Data) -> dict[str, float]:
    """Norm of the gradient over that of the value, by parameter."""
    network.eval()
    network.zero_grad()
    F.cross_entropy(network(data.inputs), data.labels).backward()
    named = network.named_parameters()
    return {name: float(one.grad.norm() / one.norm().clamp(min=1e-8)) for name, one in named if one.grad is not None}


def tune_by_gradients(one: Setting) -> Adapted:
    """Auto-RGN (Lee et al. 2023, arXiv 2210.11466, section 5.2): each tensor's rate by its relative gradient norm."""
    network = one.fresh

    def scale(optimizer: torch.optim.Optimizer) -> None:
        ratios = find_ratios(network, one.problem.target)
        top = max(ratios.values())
        for group, ratio in zip(optimizer.param_groups, ratios.values(), strict=True):
            group["lr"] = one.rate * ratio / top

    fit(network, [{"params": [own]} for own in network.parameters()], one.problem.target, one, epoch=scale)
    return Adapted(network, interpolate(one.host, network), count(network.parameters()))


def tune_largest(one: Setting) -> Adapted:
    """The layer whose weight has the largest relative gradient norm."""
    ratios = find_ratios(one.fresh, one.problem.target)
    weights = [name for name in ratios if name.endswith("weight") and one.host.get_parameter(name).ndim > 1]
    return tune_part(one, max(weights, key=ratios.__getitem__).rpartition(".")[0])


def tune_lora(one: Setting, rank: int) -> Adapted:
    """PEFT's LoRA on every linear and convolutional layer."""
    targets = [name for name, part in one.host.named_modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    return _tune_by_peft(one, peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets))


def tune_adalora(one: Setting) -> Adapted:
    """PEFT's AdaLoRA on every linear layer; it knows no convolutions."""
    targets = [name for name, part in one.host.named_modules() if isinstance(part, nn.Linear)]
    steps = EPOCHS * -(-len(one.problem.target.labels) // BATCH)
    config = peft.AdaLoraConfig(
        init_r=6, target_r=4, lora_alpha=8, tinit=steps // 6, tfinal=steps // 3, deltaT=5, total_step=steps,
        target_modules=targets,
    )  # fmt: skip
    return _tune_by_peft(one, config)


def _tune_by_peft(one: Setting, config: Any) -> Adapted:
    torch.manual_seed(one.seed)
    network: Any = peft.get_peft_model(one.fresh, config)
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    adaptive = isinstance(config, peft.AdaLoraConfig)
    allocate = network.base_model.update_and_allocate if adaptive else (lambda _: None)
    number = count(learned)
    fit(network, learned, one.problem.target, one, after=lambda steps: allocate(steps - 1))
    merged = network.merge_and_unload()
    return Adapted(merged, interpolate(one.host, merged), number)


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
    model, data = attach_everything(one), one.problem.target
    looked = model.look(
        lambda model, batch: F.cross_entropy(model(batch.inputs), batch.labels, reduction="none"),
        [data.pick(rows) for rows in torch.arange(len(data.labels)).split(BATCH)],
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


def adapt_by_trying(one: Setting) -> Adapted:
    model, data = attach_everything(one), one.problem.target
    report = esper.adapt(
        model,
        lambda model, batch: F.cross_entropy(model(batch.inputs), batch.labels),
        [data.pick(rows) for rows in torch.arange(len(data.labels)).split(BATCH)],
        score=lambda model, batch: (model(batch.inputs).argmax(1) == batch.labels).float().mean(),
        optimizer=lambda groups: torch.optim.Adam(groups, one.rate),
        epochs=EPOCHS,
        seed=one.seed,
    )
    return Adapted(model, reweigh(model), model.added_parameters, 1.0 + len(report.trials))


Arm = Callable[[Setting], Adapted]
LOW, MIDDLE, HIGH = (3e-4, 1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2), (1e-2, 3e-2, 1e-1)
ARMS: dict[str, tuple[Arm, Sequence[float]]] = {
    "full": (tune_fully, LOW),
    "replay": (lambda one: tune_fully(one, replay=True), LOW),
    "last layer": (lambda one: tune_part(one, "head"), HIGH),
    "unfrozen place": (lambda one: tune_part(one, FIXED[one.case.host][0]), LOW),
    "largest gradient": (tune_largest, MIDDLE),
    "auto-rgn": (tune_by_gradients, MIDDLE),
    "lora 4": (lambda one: tune_lora(one, 4), MIDDLE),
    "lora 16": (lambda one: tune_lora(one, 16), MIDDLE),
    "adalora": (tune_adalora, (1e-2, 3e-2, 1e-1)),
    "fixed place": (lambda one: grow_all(one, dict([FIXED[one.case.host]])), MIDDLE),
    "blocks": (lambda one: grow_all(one, dict.fromkeys(one.case.places["block_copy"], "block_copy")), MIDDLE),
    "everywhere": (
        lambda one: grow_all(one, dict.fromkeys(one.case.places[BIG[one.case.host]], BIG[one.case.host])),
        MIDDLE,
    ),
    "most promising": (grow_most_promising, (GAP_RATE,)),
    "rule look": (lambda one: grow_by_controller(one, "look"), (GAP_RATE,)),
    "policy esper": (lambda one: grow_by_controller(one, "esper"), (GAP_RATE,)),
    "esper.adapt": (adapt_by_trying, (GAP_RATE,)),
}
"""With the rates to choose from."""
LINEAR_ONLY = {"adalora": ("vit",)}
"""Hosts that an arm knows what to do with, if not all."""


@torch.no_grad()
def mean_loss(network: nn.Module, data: Data) -> float:
    network.eval()
    return float(F.cross_entropy(network(data.inputs), data.labels))


def judge(one: Setting, arm: Arm) -> dict[str, float]:
    """What an arm reaches, and what it costs."""
    protected = one.problem.source.pick(slice(PROTECTED))
    before, began = mean_loss(one.host, protected), time.monotonic()
    made = arm(one)
    seconds = time.monotonic() - began
    found = {"new": accuracy(made.network, one.problem.test), "old": accuracy(made.network, protected)}
    for share in SHARES:
        network = made.weigh(share)
        if mean_loss(network, protected) <= before * (1 + TOLERANCE):
            break
    spent = {"parameters": made.learned, "flops": made.flops, "seconds": seconds}
    return {**found, "kept": accuracy(network, one.problem.test), "share": share, **spent}


def measure(folder: Path, case: Case, seed: int, rates: Callable[[str, str], Sequence[float]], arms: list[str]) -> None:
    """Every arm at ``rates(arm, shift)`` on every shift that is not known yet."""
    path = folder / f"{case.host}-{seed}.jsonl"
    known = {record["shift"] for record in read(path)}
    host, learned = None, None
    for problem in list_problems(case, seed):
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
        rates = ARMS[arm][1]
        if len(rates) == 1:
            return rates
        others = [record["found"] for record in records if record["shift"] != shift]
        return [max(rates, key=lambda rate: float(np.mean([found[f"{arm} @{rate}"]["new"] for found in others])))]

    return choose


def show(folder: Path, hosts: Sequence[str]) -> None:
    """Means over shifts and seeds, and differences of `esper.adapt` to each arm: standard errors over shifts."""
    rows: list[tuple[str, str, int, dict[str, dict[str, float]]]] = []
    for case in CASES:
        for path in sorted(folder.glob(f"{case.host}-*.jsonl")) if case.host in hosts else []:
            seed = int(path.stem.rpartition("-")[2])
            if seed != TUNING_SEED:
                for record in read(path):
                    by_arm = {name.partition(" @")[0]: one for name, one in record["found"].items()}
                    rows.append((f"{case.host} {record['shift']}", record["kind"], seed, by_arm))
    say(CONSOLE, f"{len({row[0] for row in rows})} shifts, seeds {sorted({row[2] for row in rows})}")
    for name in ARMS:
        here = [row for row in rows if name in row[3]]
        if not here:
            continue
        figures = {key: float(np.mean([row[3][name][key] for row in here])) for key in here[0][3][name]}
        kinds = {
            kind: np.mean([row[3][name]["new"] for row in here if row[1] == kind])
            for kind in ("input", "feature", "output")
        }
        told = ", ".join(f"{kind} {100 * value:.1f}" for kind, value in kinds.items())
        new, kept = f"{100 * figures['new']:.1f}", f"{100 * figures['kept']:.1f}"
        say(
            CONSOLE,
            f"{name:17} new {new} ({told}), esper.adapt {compare(here, name, 'new')}; old {100 * figures['old']:.1f}; "
            f"within {TOLERANCE:.0%} {kept}, esper.adapt {compare(here, name, 'kept')}; "
            f"{figures['parameters']:,.0f} parameters, {figures['seconds']:.1f} s, {figures['flops']:.0f} trainings",
        )
    for case in CASES:
        here = [row for row in rows if row[0].startswith(case.host)]
        told = (
            f"{name} {100 * np.mean([row[3][name]['new'] for row in here]):.1f}"
            for name in ARMS
            if here and name in here[0][3]
        )
        say(CONSOLE, f"{case.host}: {', '.join(told)}")


def compare(rows: list[Any], name: str, key: str) -> str:
    """What `esper.adapt` is ahead by, in points: mean over shifts ± its standard error."""
    by_shift = defaultdict[str, list[float]](list)
    for shift, _, _, found in rows:
        by_shift[shift].append(found["esper.adapt"][key] - found[name][key])
    means = 100 * np.array([np.mean(differences) for differences in by_shift.values()])
    return f"{means.mean():+.1f} ± {means.std(ddof=1) / len(means) ** 0.5:.1f}"


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
            measure(folder, case, TUNING_SEED, lambda name, _: ARMS[name][1], several)
    elif not table:
        for seed in seeds:
            for case in cases:
                measure(folder, case, seed, tuned_rate(folder, case), list(ARMS))
    if not tune:
        show(folder, hosts)


if __name__ == "__main__":
    tyro.cli(main)
