"""What bfloat16 does to networks of a suite: scores of a controller on the same instances, with ``bf16`` and without.

    python benchmarks/bf16.py [--suite tokens] [--controller heuristic] [--instances 32] [--split heldout]

Differences are of pairs, bfloat16 less float32, with their standard error. How often both take the same decision shows
where a difference comes from: of a rule's decisions some go by measurements that rounding may tip over.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

from esper.lab.evaluate import find_controller
from esper.tasks.registry import get_suite
from esper.train.evaluation import evaluate_controllers
from esper.train.workers import LocalWorkers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", default="tokens")
    parser.add_argument("--controller", default="heuristic")
    parser.add_argument("--instances", type=int, default=32)
    parser.add_argument("--split", default="heldout")
    asked = parser.parse_args()
    suite = get_suite(asked.suite)
    controller, config = find_controller(asked.controller, suite)
    instances = suite.sample(asked.instances, asked.split, np.random.default_rng(0))
    scores, decisions = [], []
    with LocalWorkers(1) as workers:
        for bf16 in (False, True):
            began = time.perf_counter()
            (played,) = evaluate_controllers(workers, [controller], replace(config, bf16=bf16), instances)
            spent = time.perf_counter() - began
            scores.append(np.array([record.score for record in played.records]))
            decisions.append(np.concatenate([np.stack(log.steps) for log in played.logs], 1))  # [T, E, 8]
            name = "bf16   " if bf16 else "float32"
            sys.stdout.write(f"{name} mean score {scores[-1].mean():.4f}, {spent:.0f} s\n")
    exact, rounded = scores
    difference = rounded - exact
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    same = (decisions[0] == decisions[1]).all(-1)
    sys.stdout.write(
        f"difference {difference.mean():+.4f}, standard error {error:.4f}, of an instance at most "
        f"{np.abs(difference).max():.4f}; decisions equal: {same.mean():.1%}, episodes: {same.all(0).mean():.1%}\n"
    )


if __name__ == "__main__":
    main()
