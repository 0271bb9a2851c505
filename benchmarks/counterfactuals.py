"""What validation with counterfactuals costs a population, in passes without any, when slots take turns.

    python benchmarks/counterfactuals.py [--networks 64] [--rounds 15] [--every 1 2 3]

Every slot of every network holds a seed. With ``--every k`` slots take turns of k decisions, as with the setting
``growth.counterfactual_every``; a step's cost is the mean over k decisions. All take turns in one run, in one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import numpy as np

from esper.engine.engine import GrowthConfig
from esper.growth.blueprints.registry import get
from esper.lifecycle.rules import Rules
from esper.population.evaluation import evaluate
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process

SUITE = get_suite("tokens")


def episodes(networks: int) -> Episodes:
    """Instances of the token suite with a random seed in every slot."""
    rng = np.random.default_rng(0)
    chosen = SUITE.sample(networks, "train", rng)
    bare = Episodes(SUITE, chosen, Rules()).population
    serving = [
        [number for number, name in enumerate(SUITE.blueprints) if get(name).supports(site)]
        for site in bare.execution.sites
    ]
    fossils = [tuple(SeedKind(slot, int(rng.choice(kinds))) for slot, kinds in enumerate(serving)) for _ in chosen]
    return Episodes(SUITE, chosen, Rules(), fossils=fossils)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args()
    prepare_process()
    running = episodes(asked.networks)
    shape = running.population.table.stage.shape

    def seconds(due: np.ndarray) -> float:
        began = time.perf_counter()
        evaluate(running.population, running.validation, due)
        return time.perf_counter() - began

    nothing = np.zeros(shape, np.bool_)
    seconds(nothing)
    plain: list[float] = []
    costs: dict[int, list[float]] = {every: [] for every in asked.every}
    for _ in range(asked.rounds):
        plain.append(seconds(nothing))
        for every in asked.every:
            growth = GrowthConfig(counterfactual_every=every)
            numbers = [np.full(asked.networks, number) for number in range(every)]
            turns = [seconds(growth.find_due_counterfactuals(number, shape[1])) for number in numbers]
            costs[every].append(sum(turns) / every)
    lines = [f"{asked.networks} networks, {shape[1]} seeds each: {1e3 * median(plain):.1f} ms without counterfactuals"]
    for every, found in costs.items():
        ratios = [one / other for one, other in zip(found, plain, strict=True)]
        low, high = np.quantile(ratios, [0.25, 0.75])
        lines.append(
            f"every {every}: {1e3 * median(found):.1f} ms a step, {median(ratios):.2f} passes ({low:.2f} to {high:.2f})"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
