"""Train every arm with every seed, in turns, and let each policy play the same instances. Stopped, it goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from esper.errors import ConfigError
from esper.experiments.arms.outcome import Outcome
from esper.experiments.backend import LOCAL, Backend
from esper.experiments.compare.judged_run import JudgedRun
from esper.experiments.iteration import Iteration
from esper.experiments.settings import TrainSettings
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

_STREAM = 8
"""Keeps the instances of comparisons apart from all others."""
WHAT = "esper compare"
"""Who holds a trial's directory."""
_NAME = re.compile(r"\w[\w.+-]*")


class Trial(NamedTuple):
    """One arm with one seed."""

    arm: str
    seed: int


Progress = Callable[[int, int, Trial, Iteration | None], None]
"""Told how many trials are done, of how many, which one is under way, and its newest iteration, if it has one yet."""


@dataclass(frozen=True)
class Contest:
    """Arms that differ in their settings, on one suite."""

    folder: Path
    arms: Mapping[str, TrainSettings]
    seeds: int
    instances: int

    def __post_init__(self) -> None:
        for name in self.arms:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"an arm cannot be called {name!r}, which names its folder: use letters and digits")
        for name, settings in self.arms.items():
            if settings.seed:
                raise ConfigError(
                    f"{name} has seed {settings.seed}, but every arm is trained with seeds 0, 1, ...: leave seed out"
                )
        suites = {settings.suite for settings in self.arms.values()}
        if len(suites) > 1:
            names = ", ".join(sorted(suites))
            raise ConfigError(f"the arms train on different suites ({names}): they cannot be compared")

    @property
    def suite(self) -> str:
        """The suite that all arms train on."""
        return next(iter(self.arms.values())).suite

    def trials(self) -> list[Trial]:
        """Seed by seed, and within a seed arm by arm, each time another one first: no arm has the better hours."""
        names = list(self.arms)
        return [
            Trial(names[(place + seed) % len(names)], seed) for seed in range(self.seeds) for place in range(len(names))
        ]

    def played(self) -> list[Instance]:
        """The held-out instances that every policy plays."""
        return get_suite(self.suite).sample(self.instances, "heldout", np.random.default_rng(_STREAM))

    def path(self, trial: Trial) -> Path:
        """The trial's run directory."""
        return self.folder / trial.arm / f"seed-{trial.seed}"

    def settings(self, trial: Trial) -> TrainSettings:
        """The arm's settings with the trial's seed."""
        return self.arms[trial.arm].model_copy(update={"seed": trial.seed})


Outcomes = list[list[Outcome]]
"""What an arm's policies came to: N lists, one per training seed, of M instances."""


def run_contest(contest: Contest, progress: Progress, backend: Backend = LOCAL) -> dict[str, Outcomes]:
    """What each arm's policies came to, computed by ``backend``; trials that are done already are only read.

    Raises:
        ConfigError: the folder holds trials of other settings.
        RunError: it cannot be written.
    """
    trials, instances = contest.trials(), contest.played()
    found: dict[str, dict[int, list[Outcome]]] = {name: {} for name in contest.arms}
    with backend.open(max(settings.shards for settings in contest.arms.values())) as workers:
        for done, trial in enumerate(trials):
            progress(done, len(trials), trial, None)

            def show(iteration: Iteration, done: int = done, trial: Trial = trial) -> None:
                progress(done, len(trials), trial, iteration)

            judged = JudgedRun(contest.path(trial), contest.settings(trial), WHAT)
            found[trial.arm][trial.seed] = judged.outcomes(instances, workers, show)
    return {name: [own[seed] for seed in range(contest.seeds)] for name, own in found.items()}
