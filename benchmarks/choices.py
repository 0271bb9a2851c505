"""What the blends and tempos that the default rules leave closed are worth, each in place of the default.

    python benchmarks/choices.py [--suites tokens digits ...] [--instances 160]

The rule that looks (``look``) plays the same held-out instances once by the default rules, blend ``add`` and tempo 3,
and once per other choice. A row is the mean score less the default's, with its 95% interval over instances. A choice
whose interval lies above 0 on any suite would be worth an action.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from esper.control.rules import LookRule, LookSettings
from esper.lab.analysis import mean_interval
from esper.lifecycle.actions import TEMPOS, Blend
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Floats
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import EvaluationConfig, evaluate_controllers
from esper.train.workers import LocalWorkers, Workers

DEFAULT = Rules()
OTHERS = {
    **{f"blend {blend.name.lower()}": Rules(blends=(blend,)) for blend in Blend if blend not in DEFAULT.blends},
    **{f"tempo {tempo}": Rules(tempos=(tempo,)) for tempo in TEMPOS if tempo not in DEFAULT.tempos},
}


def main(suites: tuple[str, ...] = ("tokens", "digits", "mnist1d", "mnist1d_conv"), instances: int = 160) -> None:
    """Print a row per suite and choice."""
    table = Table("suite", "choice", "default", "less the default", "95% interval")
    with LocalWorkers(1) as workers:
        for name in suites:
            suite = get_suite(name)
            drawn = suite.sample(instances, "heldout", np.random.default_rng(0))
            families = [instance.family for instance in drawn]
            default = play(workers, suite, DEFAULT, drawn)
            for choice, rules in OTHERS.items():
                less = play(workers, suite, rules, drawn) - default
                interval = mean_interval(less[None], families)
                table.add_row(
                    name,
                    choice,
                    f"{default.mean():.3f}",
                    f"{less.mean():+.3f}",
                    f"{interval.low:+.3f} to {interval.high:+.3f}",
                )
                Console(stderr=True).print(f"{name}, {choice}: {less.mean():+.3f}")
    Console(width=120).print(table)


def play(workers: Workers, suite: Suite, rules: Rules, instances: Sequence[Instance]) -> Floats:
    """The rule's score on each instance."""
    rule = LookRule(LookSettings(), suite.steps)
    (played,) = evaluate_controllers(workers, [rule], EvaluationConfig(suite.name, rules), instances)
    return np.array([result.score for result in played.records])


if __name__ == "__main__":
    tyro.cli(main)
