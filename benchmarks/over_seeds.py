"""The policy against each baseline with training seeds as units, from runs that `esper evaluate` has played.

`python benchmarks/over_seeds.py RUN RUN ...` prints, for each split and baseline, every run's mean difference, and the
mean over the runs with its 95% t-interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy import stats

from esper.control.learned import Learned
from esper.experiments.evaluate import SPLITS
from esper.experiments.results import Result, of_split, read_results

LEVEL = 0.95


def main(runs: list[str]) -> None:
    results = [read_results(Path(run) / "evaluation.json") for run in runs]
    for split in SPLITS:
        played = [of_split(one, split) for one in results]
        names = list(dict.fromkeys(one.controller for one in played[0]))
        scores = {name: np.array([_mean_score(one, name) for one in played]) for name in names}
        own = scores.pop(Learned.name)
        growth = np.mean([one.growth for run in played for one in run if one.controller == Learned.name])
        sys.stdout.write(f"{split}: policy {_listed(own)}, mean {own.mean():.3f}, growth {growth:+.0%}\n")
        for name, theirs in scores.items():
            sys.stdout.write(f"  {name:<13} mean {theirs.mean():.3f}, policy minus it {_interval(own - theirs)}\n")


def _mean_score(results: list[Result], controller: str) -> float:
    return float(np.mean([one.score for one in results if one.controller == controller]))


def _interval(differences: np.ndarray) -> str:
    mean, error = differences.mean(), stats.sem(differences)
    low, high = stats.t.interval(LEVEL, len(differences) - 1, loc=mean, scale=error)
    return f"{_listed(differences)}: {mean:+.3f} ({low:+.3f} to {high:+.3f})"


def _listed(values: np.ndarray) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main(sys.argv[1:])
