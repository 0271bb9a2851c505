"""Train several configurations with several seeds each, in turns, and evaluate every policy on the same instances.

An interrupted experiment continues, and finished trials are only read. A trial is an ordinary run in
FOLDER/CONFIGURATION/seed-N, with the results of its policy in arms/policy.json; esper.lab.arms adds other arms there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from esper.control.learned import POLICY
from esper.errors import ConfigError, RunError
from esper.lab.comparison import Comparison, compare_arms, compare_configurations
from esper.lab.evaluate import count_pretraining, load_policy
from esper.lab.static_networks import measure_arm
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.collect import check_start_policy
from esper.train.evaluation import describe_evaluation_inputs, evaluate_controllers, make_evaluation_config
from esper.train.iteration import Iteration, summarise_run
from esper.train.results import Arm, ArmResults, cache_key, load_or_compute, read_arm
from esper.train.settings import TrainSettings
from esper.train.trainer import train_controller
from esper.train.workers import LOCAL, Backend, Workers

ARMS = "arms"
"""The folder of results, with a file per arm."""
LOCK_OWNER = "esper compare"
"""The command written into the locks of trials' directories."""
_NAME = re.compile(r"\w[\w.+-]*")
_SEED = "seed-"


class Trial(NamedTuple):
    """One configuration with one seed."""

    arm: str
    seed: int


Progress = Callable[[int, int, Trial, Iteration | None], None]
"""Called with the number of finished trials, the number of all trials, the current trial, and its newest iteration or
None."""


@dataclass(frozen=True)
class Experiment:
    """Configurations on one suite, all trained with the same seeds."""

    folder: Path
    arms: Mapping[str, TrainSettings]
    """Configurations by name; the first is compared with each of the others."""
    seeds: int
    instances: int

    def __post_init__(self) -> None:
        for name, settings in self.arms.items():
            if not _NAME.fullmatch(name):
                raise ConfigError(f"an arm cannot be called {name!r}, which names its folder: use letters and digits")
            if settings.seed:
                raise ConfigError(
                    f"{name} has seed {settings.seed}, but every arm is trained with seeds 0, 1, ...: remove seed"
                )
        suites = sorted({settings.suite for settings in self.arms.values()})
        if len(suites) > 1:
            raise ConfigError(f"the arms train on different suites ({', '.join(suites)}): they cannot be compared")

    @property
    def suite(self) -> str:
        """The suite that all configurations train on."""
        return next(iter(self.arms.values())).suite

    def list_trials(self) -> list[Trial]:
        """Trials seed by seed, with all arms of a seed in rotating order, so that no arm runs at better times."""
        names = list(self.arms)
        return [
            Trial(names[(place + seed) % len(names)], seed) for seed in range(self.seeds) for place in range(len(names))
        ]

    def sample_instances(self) -> list[Instance]:
        """The held-out instances on which every policy is evaluated."""
        return get_suite(self.suite).sample(self.instances, "heldout", numpy_generator(Stream.COMPARED_INSTANCES))

    def path(self, trial: Trial) -> Path:
        """The trial's run directory."""
        return self.folder / trial.arm / f"{_SEED}{trial.seed}"

    def settings(self, trial: Trial) -> TrainSettings:
        """The configuration with the trial's seed."""
        return self.arms[trial.arm].model_copy(update={"seed": trial.seed})


def run_experiment(experiment: Experiment, progress: Progress, backend: Backend = LOCAL) -> list[Arm]:
    """The results of each configuration's policies, computed by ``backend``; finished trials are only read."""
    # Check policies to start from before hours of training, not after.
    for settings in experiment.arms.values():
        check_start_policy(settings)
    trials, instances = experiment.list_trials(), experiment.sample_instances()
    results: dict[Trial, ArmResults] = {}
    with backend.open_workers(max(settings.shards for settings in experiment.arms.values())) as workers:
        for done, trial in enumerate(trials):
            report = partial(progress, done, len(trials), trial)
            report(None)
            run, settings = RunDirectory(experiment.path(trial)), experiment.settings(trial)
            train_controller(settings, run.path, workers=workers, watch=lambda _, report=report: nullcontext(report))
            with run.locked(LOCK_OWNER):
                results[trial] = play_policy(run, settings, instances, workers)
    # In the order of the configurations, whatever the order of the trials.
    return [Arm(name, [results[Trial(name, seed)] for seed in range(experiment.seeds)]) for name in experiment.arms]


def play_policy(
    run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance], workers: Workers
) -> ArmResults:
    """The results of a trained run's policy on the instances, read from its file if they exist."""
    policy, suite = load_policy(run, settings), get_suite(settings.suite)

    def play() -> ArmResults:
        played = evaluate_controllers(workers, [policy.controller], make_evaluation_config(settings), instances)[0]
        with RunReader.open(run.store) as reader:
            steps = summarise_run(reader).environment_steps
        # The cost includes the policy that it started from.
        steps += round(count_pretraining(settings, suite) * suite.steps)
        return ArmResults(steps, measure_arm(played, suite).outcomes)

    return load_or_compute(arm_file(run.path, POLICY), arm_key(POLICY, settings, policy.sha256, instances), play)


def arm_file(folder: Path, arm: str) -> Path:
    """The file with an arm's results, in the run on which they depend, or else in the configuration's folder."""
    return folder / ARMS / f"{arm}.json"


def arm_key(arm: str, settings: TrainSettings, policy: str, instances: Sequence[Instance]) -> str:
    """The key under which an arm's results are valid; ``policy`` is the hash of the policy on which they depend."""
    return cache_key(arm, describe_evaluation_inputs(settings, policy), [instance.to_json() for instance in instances])


def is_experiment(folder: Path) -> bool:
    """Whether the folder contains trials of `esper compare`."""
    return any(folder.glob(f"*/{_SEED}*/config.yaml"))


def read_experiment(folder: Path) -> tuple[Comparison, Comparison | None]:
    """Read a comparison, even while it is running, over the seeds that all configurations have finished.

    The first configuration is compared with each other one, and its policies with all other arms that are finished.
    """
    # Only seeds that every configuration has finished can be compared.
    done: dict[str, set[int]] = {}
    for path in folder.glob(f"*/{_SEED}*/{ARMS}/{POLICY}.json"):
        number = path.parents[1].name.removeprefix(_SEED)
        if number.isdecimal():
            done.setdefault(path.parents[2].name, set()).add(int(number))
    seeds = sorted(set[int].intersection(*done.values())) if done else []
    if not seeds:
        raise RunError(f"no training seed is finished for all configurations in {folder}: continue `esper compare`")

    # The first configuration is the one whose first trial started first.
    def read_start(name: str) -> float:
        with RunReader.open(RunDirectory(folder / name / f"{_SEED}{seeds[0]}").store) as reader:
            ((time,),) = reader.rows("SELECT coalesce(min(time), 0.0) AS time FROM events")
        return time

    trials = {
        name: [folder / name / f"{_SEED}{seed}" for seed in seeds]
        for name in sorted(done, key=lambda name: (read_start(name), name))
    }
    configurations = [_read_arm(name, [arm_file(run, POLICY) for run in runs]) for name, runs in trials.items()]
    first = configurations[0].name
    instances = [result.instance for result in configurations[0].outcomes[0]]
    if not all(_has_played(arm, instances) for arm in configurations):
        raise RunError(f"the policies in {folder} did not all play the same instances: call `esper compare` again")

    # The policy, then all other finished arms; those that depend on policies need all seeds.
    files = {path.stem: [path] for path in sorted((folder / first / ARMS).glob("*.json"))}
    for path in sorted((trials[first][0] / ARMS).glob("*.json")):
        by_seed = [run / ARMS / path.name for run in trials[first]]
        if all(file.is_file() for file in by_seed):
            files[path.stem] = by_seed
    policy = _read_arm(POLICY, files.pop(POLICY))
    others = [_read_arm(name, paths) for name, paths in files.items()]
    comparable = [arm for arm in others if _has_played(arm, instances)]
    arms = compare_arms([policy, *comparable]) if comparable else None
    return compare_configurations(configurations), arms


def _has_played(arm: Arm, instances: Sequence[str]) -> bool:
    """Whether all seeds of an arm have results on exactly these instances."""
    return all([result.instance for result in results] == instances for results in arm.outcomes)


def _read_arm(name: str, files: Sequence[Path]) -> Arm:
    seeds: list[ArmResults] = []
    for path in files:
        results = read_arm(path)
        if results is None:
            raise RunError(f"{path} is damaged or of another version: delete it, and call `esper compare` again")
        seeds.append(results)
    return Arm(name, seeds)
