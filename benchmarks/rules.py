"""What rules reach on the token suite, with nothing learned: the rule that looks beside fixed and tuned ones.

    python benchmarks/rules.py [--instances 512] [--seed 77] [--runs RUN ...]

All play the same instances, of the families that tuning saw (``heldout``) and of others (``transfer``). Beside the rule
that looks there are three that look wrongly: at what is promised to another network, at the fitted promise alone, and
at the held-out one alone. What others score less than it is a mean over instances ± its standard error. With ``--runs``
the policies of these runs of ``esper train`` play instead, and the rule that looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.config.loading import load_settings
from esper.control.controller import Actions, Controller
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation, list_features
from esper.lab.evaluate import load_policy
from esper.lifecycle.rules import ActionMasks, Rules
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train.evaluation import EvaluationConfig, create_baselines, evaluate_controllers
from esper.train.results import SPLITS, Result
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers

SUITE = get_suite("tokens")
WORKERS = 2


class Misled(LookRule):
    """Sees what is promised to its neighbour, which is of another family."""

    name = "look, another's promise"

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """As the rule would there."""
        seen = [
            torch.cat((part[..., : len(own)], part[..., len(own) :].roll(1, 0)), -1)
            for part, own in zip(observation, list_features(promise=False), strict=True)
        ]
        return super().act(Observation(*seen), masks, state)


def renamed(name: str, **changed: float) -> Controller:
    """The rule with other settings."""
    rule = LookRule(LookSettings.model_validate(changed), SUITE.steps)
    rule.name = name
    return rule


def policy_of(path: Path) -> Controller:
    """The newest policy of a run, greedy, under the run's name."""
    run = RunDirectory.open_training_run(path)
    controller = load_policy(run, load_settings(TrainSettings, run.config)).controller
    controller.name = path.name
    return controller


def main(instances: int = 512, seed: int = 77, runs: tuple[Path, ...] = ()) -> None:
    """Print a table per split."""
    rules = [
        *create_baselines(SUITE),
        Misled(LookSettings(), SUITE.steps),
        renamed("look, fitted only", fitted=1.0),
        renamed("look, held out only", fitted=0.0),
    ]
    controllers = [renamed(LookRule.name), *map(policy_of, runs)] if runs else rules
    with LocalWorkers(WORKERS) as workers:
        for split in SPLITS:
            drawn = SUITE.sample(instances, split, np.random.default_rng(seed))
            played = evaluate_controllers(workers, controllers, EvaluationConfig(SUITE.name, Rules()), drawn)
            results = {one.name: other.records for one, other in zip(controllers, played, strict=True)}
            Console().print(table(split, results[LookRule.name], results))


def table(split: str, looking: Sequence[Result], results: dict[str, list[Result]]) -> Table:
    """Scores of all, and what they are less the rule's."""
    made = Table("controller", "score", "added parameters", "less look", title=f"{len(looking)} instances, {split}")
    reference = np.array([one.score for one in looking])
    for name, records in results.items():
        scores = np.array([one.score for one in records])
        added = np.mean([one.added_parameters / one.host_parameters for one in records])
        less = scores - reference
        error = less.std(ddof=1) / np.sqrt(len(less))
        made.add_row(name, f"{scores.mean():.3f}", f"{added:.0%}", f"{less.mean():+.3f} ± {error:.3f}")
    return made


if __name__ == "__main__":
    tyro.cli(main)
