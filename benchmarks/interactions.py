"""What it costs to measure how kept modules interact, as a share of playing the probe instances that keep them.

`python benchmarks/interactions.py` plays 56 instances, as a probe of `esper train` does, and then measures the Shapley
values and interactions of the modules that were kept. It prints the most modules in a network, the sets of modules
whose score was measured, and CPU seconds. `all_at_start` keeps a module in every slot: the most that there can be.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from esper.lifecycle.rules import Rules
from esper.population.forward import select_committed
from esper.population.shapley import MOST_EXACT
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig, attribute_kept_seeds, create_baselines
from esper.train.settings import TrainSettings
from esper.train.workers import prepare_process

PLAYED = (
    ("tokens", "look"),
    ("tokens", "all_at_start"),
    ("generated:27", "all_at_start"),
    ("generated:7", "all_at_start"),
)
REPEATS = 5


def main() -> None:
    """Print a line per suite and controller."""
    prepare_process()
    print("suite          controller    kept  sets  play s  measure s  share")  # noqa: T201
    for suite_name, controller_name in PLAYED:
        suite = get_suite(suite_name)
        (controller,) = [one for one in create_baselines(suite) if one.name == controller_name]
        instances = suite.sample(TrainSettings().probe_instances, "train", np.random.default_rng(0))

        # The probe.
        began = time.process_time()
        episodes = EvaluationConfig(suite_name, Rules()).for_controller(controller).create_episodes(instances)
        state = controller.start([instance.seed for instance in instances])
        while not episodes.finished.all():
            actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
            episodes.step(actions)
        episodes.final_score()
        played = time.process_time() - began

        # What its modules are worth.
        seconds: list[float] = []
        for _ in range(REPEATS):
            began = time.process_time()
            attribute_kept_seeds(episodes, "pairs")
            seconds.append(time.process_time() - began)
        kept = int(select_committed(episodes.population).slots.sum(axis=1).max())
        slots = len(suite.sites)
        sets = 2**kept if kept <= MOST_EXACT else slots * (slots + 1) // 2 + 2
        print(  # noqa: T201
            f"{suite_name:<14} {controller_name:<13} {kept:4} {sets:5} {played:7.2f} {median(seconds):10.3f} "
            f"{median(seconds) / played:6.1%}"
        )


if __name__ == "__main__":
    main()
