"""What the governor costs: CPU time of a decision of 64 networks with it and without it, side by side.

`python benchmarks/governor.py` prints the median ratio and how far single steps spread around it.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from esper.control.rules import Uniform
from esper.engine.engine import GrowthConfig
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process

NETWORKS = 64


def main() -> None:
    prepare_process()
    suite = get_suite("tokens")
    chosen = suite.sample(NETWORKS, "train", np.random.default_rng(1))
    arms = [Episodes(suite, chosen, Rules(), growth) for growth in (GrowthConfig(), GrowthConfig(governor=None))]
    controller = Uniform()
    states = [controller.start([one.seed for one in chosen]) for _ in arms]
    seconds: list[list[float]] = [[], []]
    for step in range(suite.steps):
        for arm in (0, 1) if step % 2 else (1, 0):
            actions, states[arm] = controller.act(arms[arm].observe(), arms[arm].legal_actions(), states[arm])
            began = time.process_time()
            arms[arm].step(actions)
            seconds[arm].append(time.process_time() - began)
    ratios = np.array(seconds[0]) / np.array(seconds[1])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    sys.stdout.write(f"CPU time with the governor over without: {middle:.3f} (quartiles {low:.3f} to {high:.3f})\n")


if __name__ == "__main__":
    main()
