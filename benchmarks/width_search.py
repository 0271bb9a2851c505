"""At how many times the FLOPs of one training that grows does a search over widths and modules equal it?

    pip install optuna
    python benchmarks/width_search.py FOLDER          # after `gromo_mlp.py FOLDER arms`

Optuna's default sampler proposes widths of the three hidden layers and a module, or none, behind each. Networks within
the final size of the growth that they are compared with are trained from scratch, as they are there, until the search
has spent 16 times its FLOPs. The one that is best on validation data is reported, by its test data.
"""

from __future__ import annotations

from pathlib import Path

import optuna
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from width_mlp import (
    BOTH,
    LAYERS,
    MODULES,
    SEEDS,
    TASKS,
    Result,
    accuracy,
    flat,
    make_host,
    make_mlp,
    train_static,
)
from width_tables import MULTIPLES, Search, Trial, tabulate_search
from zoo.data import Splits, load

import esper
from esper.dash.output import print_line
from esper.growth.blueprints import get
from esper.train.workers import prepare_process

WIDEST, PROPOSALS = 32, 2000
"""Most units in a layer, and most proposals of a search."""


def search(task: str, seed: int, splits: Splits, grown: Result, console: Console) -> Search:
    """Networks within the size of ``grown``, for 16 times its FLOPs; larger ones are pruned before they train."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    features = splits.train.inputs[0].numel()
    names = esper.attach(make_host(splits, seed), MODULES, flat(splits.train.inputs[:2])).slots["1"].blueprints
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    trials, spent, proposed = list[Trial](), 0.0, 0
    while spent < MULTIPLES[-1] * grown.flops and proposed < PROPOSALS:
        asked = study.ask()
        proposed += 1
        widths = tuple(asked.suggest_int(f"n_units_{layer}", 4, WIDEST, log=True) for layer in range(LAYERS))
        modules = tuple(asked.suggest_categorical(f"module_{layer}", ["", *names]) for layer in range(LAYERS))
        torch.manual_seed(seed)
        model = esper.attach(make_mlp(features, widths, splits.classes), MODULES, flat(splits.train.inputs[:2]))
        for layer, name in enumerate(modules):
            if name:
                slot = model.slots[f"{2 * layer + 1}"]
                slot.germinate(name, alpha=1.0)
                slot.fossilize()
        size = model.host_parameters + sum(
            get(name).parameters_at(model.slots[f"{2 * layer + 1}"].site) for layer, name in enumerate(modules) if name
        )
        if size > grown.parameters:
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            continue
        net, flops, _ = train_static(model.finalize(), splits, seed)
        right = accuracy(net, splits.validation.inputs, splits.validation.labels)
        study.tell(asked, right)
        spent += flops
        test = accuracy(net, splits.test.inputs, splits.test.labels)
        trials.append(Trial(widths, modules, right, test, size, round(spent / grown.flops, 3)))
        print_line(
            console, f"{task}, seed {seed}: {widths} {modules}, validation {right:.3f}, spent {trials[-1].spent}"
        )
    return Search(task, seed, tuple(trials), proposed)


def main(folder: tyro.conf.Positional[Path], tasks: tuple[str, ...] = TASKS, seeds: tuple[int, ...] = SEEDS) -> None:
    """Do the searches that are missing, and compare."""
    prepare_process()
    console = Console(width=160)
    arms, searches = ResultFile(folder / "mlp_arms.jsonl", Result), ResultFile(folder / "mlp_search.jsonl", Search)
    grown = {(one.arm.task, one.arm.seed): one for one in arms.results if one.arm.how == BOTH}
    done = {(one.task, one.seed) for one in searches.results}
    for seed in seeds:
        for task in tasks:
            if (task, seed) in done:
                continue
            if (task, seed) not in grown:
                raise SystemExit(f"error: a search has the FLOPs and size of growth: gromo_mlp.py {folder} arms")
            searches.add(made := search(task, seed, load(task), grown[task, seed], console))
            print_line(console, f"{task}, seed {seed}: {len(made.trials)} trials of {made.proposed} proposals")
    for line in tabulate_search(searches.results, arms.results):
        print_line(console, line)


if __name__ == "__main__":
    tyro.cli(main)
