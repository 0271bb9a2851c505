"""Is one way to train a controller better than another? Every way with several seeds, in turns, each policy on the same
instances. What was stopped goes on; what is done is only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from esper.config import dump_settings, load_settings
from esper.errors import ConfigError, RunError
from esper.experiments.evaluate import load_policy
from esper.experiments.evaluation import evaluate_controllers, evaluation_config
from esper.experiments.iteration import Iteration
from esper.experiments.process_pool import run_task
from esper.experiments.results import Outcomes, Result, read_outcomes
from esper.experiments.settings import TrainSettings
from esper.experiments.static_networks import measure_arm
from esper.experiments.trainer import Trainer
from esper.experiments.workers import LOCAL, Backend, Workers
from esper.files import write_atomically
from esper.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.telemetry.run_directory import RunDirectory


@dataclass(frozen=True)
class JudgedRun:
    """A run at a path, with these settings; ``what`` is the command that holds it meanwhile."""

    path: Path
    settings: TrainSettings
    what: str

    def outcomes(
        self, instances: Sequence[Instance], workers: Workers, report: Callable[[Iteration], None]
    ) -> list[Result]:
        """Of the run's policy on each instance; ``report`` is called after each iteration.

        Raises:
            ConfigError: the path holds a run of other settings.
            RunError: it cannot be written.
        """
        return run_task(self.judged(instances, workers), report)

    def judged(self, instances: Sequence[Instance], workers: Workers) -> Generator[Iteration, None, list[Result]]:
        """As `outcomes`; tells of each iteration."""
        new = not (self.path / "config.yaml").exists()
        run = RunDirectory.create(self.path) if new else RunDirectory(self.path)
        with run.locked(self.what):
            self._settle(run, new)
            records = _read_known(run, instances)
            if records is None:
                yield from self._trained(run, workers)
                policy = load_policy(run, self.settings).controller
                played = evaluate_controllers(workers, [policy], evaluation_config(self.settings), instances)[0]
                records = measure_arm(played, get_suite(self.settings.suite)).outcomes
                write_atomically(_file(run), json.dumps([record.to_json() for record in records]))
        return records

    def _settle(self, run: RunDirectory, new: bool) -> None:
        """Write a new run's settings; those of one that is there already must be the same."""
        if new:
            run.require_new()
            dump_settings(self.settings, run.config)
        elif load_settings(TrainSettings, run.config) != self.settings:
            raise ConfigError(f"{run.path} was trained with other settings: choose another --run-dir for this")

    def _trained(self, run: RunDirectory, workers: Workers) -> Generator[Iteration]:
        with run.open_store() as store:
            trainer = Trainer.opened(run, self.settings, store, workers)
            if trainer.done < self.settings.iterations:
                yield from trainer.iterations()


def _read_known(run: RunDirectory, instances: Sequence[Instance]) -> list[Result] | None:
    """The records of a run that is done, if they are of these instances."""
    try:
        records = read_outcomes(_file(run))
    except RunError:
        return None
    same = [record.instance for record in records] == [instance.name for instance in instances]
    return records if same else None


def _file(run: RunDirectory) -> Path:
    return run.path / "contest.json"


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
        return get_suite(self.suite).sample(self.instances, "heldout", numpy_generator(Stream.COMPARED_INSTANCES))

    def path(self, trial: Trial) -> Path:
        """The trial's run directory."""
        return self.folder / trial.arm / f"seed-{trial.seed}"

    def settings(self, trial: Trial) -> TrainSettings:
        """The arm's settings with the trial's seed."""
        return self.arms[trial.arm].model_copy(update={"seed": trial.seed})


def run_contest(contest: Contest, progress: Progress, backend: Backend = LOCAL) -> dict[str, Outcomes]:
    """What each arm's policies came to, computed by ``backend``; trials that are done already are only read.

    Raises:
        ConfigError: the folder holds trials of other settings.
        RunError: it cannot be written.
    """
    trials, instances = contest.trials(), contest.played()
    found: dict[str, dict[int, list[Result]]] = {name: {} for name in contest.arms}
    with backend.open(max(settings.shards for settings in contest.arms.values())) as workers:
        for done, trial in enumerate(trials):
            progress(done, len(trials), trial, None)

            def show(iteration: Iteration, done: int = done, trial: Trial = trial) -> None:
                progress(done, len(trials), trial, iteration)

            judged = JudgedRun(contest.path(trial), contest.settings(trial), WHAT)
            found[trial.arm][trial.seed] = judged.outcomes(instances, workers, show)
    return {name: [own[seed] for seed in range(contest.seeds)] for name, own in found.items()}
