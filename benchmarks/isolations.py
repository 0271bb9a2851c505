"""Does it matter how a seed learns before it counts? Three hosts, grown by the same rule under each isolation.

`python benchmarks/isolations.py FOLDER --seeds 0 1 2 3 4` trains every host without growth and under each isolation,
and prints test accuracies, means over seeds and differences to no growth, paired by seed, with 95% intervals.
Stopped, it goes on: runs that are done are only read. It computes in one thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tyro
from practice import Pair, train_once
from rich.console import Console
from rich.table import Table
from zoo.data import load
from zoo.hosts import HOSTS as KINDS

from esper.errors import EsperError
from esper.lab.analysis import mean_interval
from esper.lifecycle.rules import Isolation, Rules
from esper.train.workers import prepare_process

HOSTS = (("digits", "mlp"), ("mnist1d", "conv1d"), ("digits", "vit"))
NOTHING = "no growth"


def main(folder: tyro.conf.Positional[Path], seeds: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    """Run what is missing, and print the table."""
    prepare_process()
    console = Console(width=120)
    table = Table("host", "isolation", "accuracy by seed", "mean", "less no growth", box=None)
    for task, host in HOSTS:
        scores = {
            way: np.array([_train(folder, task, host, way, seed) for seed in seeds]) for way in (NOTHING, *Isolation)
        }
        for way, accuracies in scores.items():
            gain = "" if way == NOTHING else _format_gain(accuracies - scores[NOTHING])
            by_seed = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
            table.add_row(f"{host} on {task}", way, by_seed, f"{accuracies.mean():.3f}", gain)
    console.print(table)


def _format_gain(differences: np.ndarray) -> str:
    if len(differences) < 2:
        return f"{differences.mean():+.3f}"
    interval = mean_interval(differences[:, None], None)
    return f"{interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _train(folder: Path, task: str, host: str, way: str, seed: int) -> float:
    """Test accuracy."""
    path = folder / f"{host}-{task}" / f"{way.replace(' ', '_')}-seed{seed}.json"
    isolated = {"isolation": way, "operations": ("wait", "germinate", "advance", "fossilize", "prune")}
    rules = Rules() if way in (NOTHING, Isolation.NONE) else Rules.model_validate(isolated)
    controller = "none" if way == NOTHING else "heuristic"
    return train_once(path, Pair(task, host, load(task)), controller, seed, KINDS[host].epochs, rules).accuracy


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
