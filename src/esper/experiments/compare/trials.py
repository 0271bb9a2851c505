"""Train every arm with every seed, in turns, and let each policy play the same instances. Stopped, it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from esper.config import dump_settings, load_settings
from esper.errors import ConfigError, RunError
from esper.experiments.arms.outcome import Outcome, shown
from esper.experiments.evaluate import load_policy
from esper.experiments.evaluation_files import read_json
from esper.experiments.iteration import Iteration
from esper.experiments.play import play, terms_of
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.trainer import Trainer
from esper.experiments.workers import LocalWorkers
from esper.files import write_atomically
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

_STREAM = 8
"""Keeps the instances of comparisons apart from all others."""
WHAT = "esper compare"
"""Who holds a trial's directory."""
_NAME = re.compile(r"\w[\w.+-]*")
_RECORDS = TypeAdapter(list[Outcome])


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


def scores_of(outcomes: Outcomes) -> NDArray[np.float64]:
    """``[N, M]``."""
    return np.array([[one.score for one in own] for own in outcomes])


def run_contest(contest: Contest, progress: Progress) -> dict[str, Outcomes]:
    """What each arm's policies came to; trials that are done already are only read.

    Raises:
        ConfigError: the folder holds trials of other settings.
        RunError: it cannot be written.
    """
    trials, instances = contest.trials(), contest.played()
    found: dict[str, dict[int, list[Outcome]]] = {name: {} for name in contest.arms}
    with LocalWorkers(max(settings.shards for settings in contest.arms.values())) as workers:
        for done, trial in enumerate(trials):
            progress(done, len(trials), trial, None)

            def show(iteration: Iteration, done: int = done, trial: Trial = trial) -> None:
                progress(done, len(trials), trial, iteration)

            found[trial.arm][trial.seed] = _outcomes(contest, trial, instances, workers, show)
    return {name: [own[seed] for seed in range(contest.seeds)] for name, own in found.items()}


def _outcomes(
    contest: Contest,
    trial: Trial,
    instances: list[Instance],
    workers: LocalWorkers,
    report: Callable[[Iteration], None],
) -> list[Outcome]:
    """Of the trial's policy on each instance."""
    settings, path = contest.settings(trial), contest.path(trial)
    new = not (path / "config.yaml").exists()
    run = RunDirectory.create(path) if new else RunDirectory(path)
    with run.locked(WHAT):
        _settle(run, settings, new)
        records = _known(run, instances)
        if records is None:
            _train(run, settings, workers, report)
            policy = load_policy(run, settings).controller
            played = play(workers, [policy], terms_of(settings), instances)[0]
            records = shown(played, get_suite(settings.suite)).outcomes
            write_atomically(_file(run), json.dumps([asdict(record) for record in records]))
    return records


def _settle(run: RunDirectory, settings: TrainSettings, new: bool) -> None:
    """Write a new run's settings; those of one that is there already must be the same."""
    if new:
        run.require_new()
        dump_settings(settings, run.config)
    elif load_settings(TrainSettings, run.config) != settings:
        raise ConfigError(f"{run.path} was trained with other settings: choose another --run-dir for this comparison")


def _train(
    run: RunDirectory, settings: TrainSettings, workers: LocalWorkers, report: Callable[[Iteration], None]
) -> None:
    with run.open_store() as store:
        trainer = Trainer.opened(run, settings, store, workers)
        if trainer.done < settings.iterations:
            trainer.train(report)


def _known(run: RunDirectory, instances: list[Instance]) -> list[Outcome] | None:
    """The records of a trial that is done, if they are of these instances."""
    try:
        records: list[Outcome] = read_json(_file(run), _RECORDS)
    except RunError:
        return None
    same = [record.instance for record in records] == [instance.name for instance in instances]
    return records if same else None


def _file(run: RunDirectory) -> Path:
    return run.path / "contest.json"
