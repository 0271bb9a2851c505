"""Train several configurations with several seeds each, in turns, and evaluate every policy on the same instances.

A training is an ordinary run in FOLDER/CONFIGURATION/seed-N, with its policy's results in arms/policy.json. Beside it
are the other arms: the baselines, and those that depend on each policy: its own actions shuffled, the best fixed
sequence found with its budget, and networks of fixed shape. An interrupted experiment continues.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from esper.control.controller import Controller, hash_file, is_in_file, load_controller
from esper.control.learned import POLICY
from esper.control.rules import SHUFFLED, Planting, Schedule, shuffle_actions
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError, RunError
from esper.lab.analysis import Comparison, compare_arms, compare_configurations
from esper.lab.bench_suite import MOST_PLANTINGS, family_weights, make_schedule
from esper.lab.evaluate import count_pretraining, count_trainings, load_policy
from esper.lab.static_networks import MeasuredArm, Prices, StaticNetwork, measure_arm, train_static
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Fossils
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory, hold_lock
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.evaluation import (
    EvaluationConfig,
    EvaluationResult,
    create_baselines,
    describe_evaluation_inputs,
    evaluate_controllers,
    make_evaluation_config,
)
from esper.train.iteration import Iteration, summarise_run
from esper.train.recorder import stack_actions
from esper.train.results import Arm, ArmResults, cache_key, load_or_compute, read_arm
from esper.train.settings import TrainSettings
from esper.train.trainer import check_start_policy, train_controller
from esper.train.workers import LOCAL, Backend, Workers

ARMS = "arms"
"""The folder of results, with a file per arm."""
LOCK_OWNER = "esper compare"
"""The command written into the locks of runs' directories."""
_NAME = re.compile(r"\w[\w.+-]*")
_SEED = "seed-"


class Training(NamedTuple):
    """The training of one configuration with one seed."""

    arm: str
    seed: int


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
        return next(iter(self.arms.values())).suite

    def list_trainings(self) -> list[Training]:
        """Seed by seed, with the arms in rotating order, so that no arm runs at better times."""
        names, count = list(self.arms), len(self.arms)
        return [Training(names[(place + seed) % count], seed) for seed in range(self.seeds) for place in range(count)]

    def sample_instances(self) -> list[Instance]:
        return get_suite(self.suite).sample(self.instances, "heldout", numpy_generator(Stream.COMPARED_INSTANCES))

    def open_run(self, training: Training) -> tuple[RunDirectory, TrainSettings]:
        run = RunDirectory(self.folder / training.arm / f"{_SEED}{training.seed}")
        return run, self.arms[training.arm].model_copy(update={"seed": training.seed})


def run_experiment(
    experiment: Experiment, progress: Callable[[int, int, Training, Iteration | None], None], backend: Backend = LOCAL
) -> list[Arm]:
    """The results of each configuration's policies; finished trainings are only read.

    ``progress`` gets the numbers of finished and of all trainings, the current one, and its newest iteration.
    """
    # Check policies to start from before hours of training, not after.
    for settings in experiment.arms.values():
        check_start_policy(settings)
    trainings, instances = experiment.list_trainings(), experiment.sample_instances()
    results: dict[Training, ArmResults] = {}
    with backend.open_workers(max(settings.shards for settings in experiment.arms.values())) as workers:
        for done, training in enumerate(trainings):
            report = partial(progress, done, len(trainings), training)
            report(None)
            run, settings = experiment.open_run(training)
            train_controller(settings, run.path, workers=workers, watch=lambda _, report=report: nullcontext(report))
            with run.locked(LOCK_OWNER):
                results[training] = play_policy(run, settings, instances, workers)
    return [Arm(name, [results[Training(name, seed)] for seed in range(experiment.seeds)]) for name in experiment.arms]


def play_policy(
    run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance], workers: Workers
) -> ArmResults:
    """The results of a run's policy on the instances, read from its file if they exist."""
    policy, suite = load_policy(run, settings), get_suite(settings.suite)

    def play() -> ArmResults:
        played = evaluate_controllers(workers, [policy.controller], make_evaluation_config(settings), instances)[0]
        with RunReader.open(run.store) as reader:
            steps = summarise_run(reader).environment_steps
        # The cost includes the policy that it started from.
        steps += round(count_pretraining(settings, suite) * suite.steps)
        return ArmResults(steps, measure_arm(played, suite).outcomes)

    return load_or_compute(arm_file(run.path, POLICY), _arm_key(POLICY, settings, policy.sha256, instances), play)


def arm_file(folder: Path, arm: str) -> Path:
    """The file with an arm's results, in the run on which they depend or the configuration's folder."""
    return folder / ARMS / f"{arm}.json"


def _arm_key(arm: str, settings: TrainSettings, source: str, instances: Sequence[Instance]) -> str:
    """The key under which results are valid; ``source`` is the hash of the policy or file behind them."""
    return cache_key(arm, describe_evaluation_inputs(settings, source), [instance.to_json() for instance in instances])


def read_experiment(folder: Path) -> tuple[Comparison, Comparison | None]:
    """Compare configurations over the seeds that all have finished, and all finished arms."""
    # Only seeds that every configuration has finished can be compared.
    done: dict[str, set[int]] = {}
    for path in folder.glob(f"*/{_SEED}*/{ARMS}/{POLICY}.json"):
        number = path.parents[1].name.removeprefix(_SEED)
        if number.isdecimal():
            done.setdefault(path.parents[2].name, set()).add(int(number))
    seeds = sorted(set[int].intersection(*done.values())) if done else []
    if not seeds:
        raise RunError(f"no training seed is finished for all configurations in {folder}: continue `esper compare`")

    # The first configuration is the one whose first training started first.
    def read_start(name: str) -> float:
        with RunReader.open(RunDirectory(folder / name / f"{_SEED}{seeds[0]}").store) as reader:
            ((time,),) = reader.rows("SELECT coalesce(min(time), 0.0) AS time FROM events")
        return time

    runs = {
        name: [folder / name / f"{_SEED}{seed}" for seed in seeds]
        for name in sorted(done, key=lambda name: (read_start(name), name))
    }
    configurations = [_read_arm(name, [arm_file(run, POLICY) for run in paths]) for name, paths in runs.items()]
    policy = configurations[0]
    instances = [result.instance for result in policy.outcomes[0]]

    def has_played(arm: Arm) -> bool:
        return all([result.instance for result in results] == instances for results in arm.outcomes)

    if not all(map(has_played, configurations)):
        raise RunError(f"the policies in {folder} did not all play the same instances: call `esper compare` again")

    # All other finished arms; those that depend on policies need all seeds.
    first = runs[policy.name]
    files = {path.stem: [path] for path in sorted((folder / policy.name / ARMS).glob("*.json"))}
    for path in sorted((first[0] / ARMS).glob("*.json")):
        by_seed = [run / ARMS / path.name for run in first]
        if path.stem != POLICY and all(file.is_file() for file in by_seed):
            files[path.stem] = by_seed
    arms = [arm for arm in (_read_arm(name, paths) for name, paths in files.items()) if has_played(arm)]
    compared = compare_arms([Arm(POLICY, policy.seeds), *arms]) if arms else None
    return compare_configurations(configurations), compared


def _read_arm(name: str, files: Sequence[Path]) -> Arm:
    seeds: list[ArmResults] = []
    for path in files:
        results = read_arm(path)
        if results is None:
            raise RunError(f"{path} is damaged or of another version: delete it, and call `esper compare` again")
        seeds.append(results)
    return Arm(name, seeds)


# All arms

SEQUENCE = "sequence"
STATIC = "static"
STATIC_EQUAL_FLOPS = "static_equal_flops"
NONE_EQUAL_FLOPS = "none_equal_flops"

SURVIVORS = 4
"""One candidate in this many survives a round."""
FIRST_ROUND = 21
"""Approximate number of instances per candidate in the first round."""
FINALISTS = 2
"""Smallest number of candidates in the last round."""

CountSteps = Callable[[int], None]
"""Gets the environment steps that a search has taken since the last call."""


@dataclass(frozen=True)
class _Job:
    """An arm to compute, for one training seed if it depends on them."""

    arm: str
    folder: Path
    """The run whose policy it depends on, or the configuration's folder."""
    key: str
    steps: int
    """Environment steps, approximately."""
    compute: Callable[[CountSteps], ArmResults]
    label: str


def load_own_controllers(experiment: Experiment, addresses: Sequence[str]) -> dict[str, Controller]:
    suite = get_suite(experiment.suite)
    taken = [POLICY, *(rule.name for rule in create_baselines(suite)), SHUFFLED, SEQUENCE]
    taken += [STATIC, STATIC_EQUAL_FLOPS, NONE_EQUAL_FLOPS]
    controllers: dict[str, Controller] = {}
    for address in addresses:
        if not is_in_file(address):
            raise ConfigError(f"--controller {address}: give FILE.py:NAME; the baselines play in any case")
        controllers[address] = load_controller(address, suite.steps, taken)
        taken.append(controllers[address].name)
    return controllers


def run_arms(
    experiment: Experiment,
    progress: Callable[[int, int, str], None],
    backend: Backend = LOCAL,
    own: Mapping[str, Controller] = MappingProxyType({}),
) -> list[Arm]:
    """The arms of a finished experiment: the first configuration's policy, then all others; stored results are reused.

    ``own`` are the user's controllers, by their ``FILE.py:NAME``. ``progress`` gets the steps done, their
    total, and the current arm (empty at the end).
    """
    instances, name = experiment.sample_instances(), next(iter(experiment.arms))
    settings, folder, suite = experiment.arms[name], experiment.folder / name, get_suite(experiment.suite)
    results: dict[str, list[ArmResults]] = {}

    def play_once(controller: Controller, address: str, _: CountSteps) -> ArmResults:
        # The search for a tuned baseline's settings counts as its cost.
        searched = round(count_trainings(address or controller.name, suite) * suite.steps)
        played = evaluate_controllers(workers, [controller], make_evaluation_config(settings), instances)[0]
        return ArmResults(searched, measure_arm(played, suite).outcomes)

    with hold_lock(folder / "arms.lock", LOCK_OWNER), backend.open_workers(settings.shards) as workers:
        # Baselines and the user's controllers run once; all other arms depend on the policy of each training seed.
        jobs = [
            _Job(
                arm=controller.name,
                folder=folder,
                key=_arm_key(controller.name, settings, hash_file(address) if address else "", instances),
                steps=len(instances) * suite.steps,
                compute=partial(play_once, controller, address),
                label=controller.name,
            )
            for address, controller in [*(("", rule) for rule in create_baselines(suite)), *own.items()]
        ]
        for seed in range(experiment.seeds):
            run, seeded = experiment.open_run(Training(name, seed))
            policy = play_policy(run, seeded, instances, workers)
            results.setdefault(POLICY, []).append(policy)
            jobs += _list_followers(run, seeded, instances, workers, policy.environment_steps)

        # Progress is measured in environment steps, because arms take very different times.
        done, total = 0, sum(job.steps for job in jobs)
        for job in jobs:
            taken = 0

            def count_steps(steps: int, job: _Job = job, done: int = done) -> None:
                nonlocal taken
                taken += steps
                progress(done + taken, total, job.label)

            count_steps(0)
            compute = partial(job.compute, count_steps)
            results.setdefault(job.arm, []).append(load_or_compute(arm_file(job.folder, job.arm), job.key, compute))
            done += job.steps
    progress(total, total, "")
    return [Arm(arm, seeds) for arm, seeds in results.items()]


def _list_followers(
    run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance], workers: Workers, environment_steps: int
) -> list[_Job]:
    """The arms that depend on the policy of one training seed, which took ``environment_steps``."""
    suite, config, policy = get_suite(settings.suite), make_evaluation_config(settings), load_policy(run, settings)

    def play(controller: Controller) -> EvaluationResult:
        return evaluate_controllers(workers, [controller], config, instances)[0]

    @cache
    def play_again() -> EvaluationResult:
        return play(policy.controller)

    @cache
    def measure_policy() -> MeasuredArm:
        return measure_arm(play_again(), suite)

    def shuffle(_: CountSteps) -> ArmResults:
        """The policy's own actions, each instance's applied to another one."""
        rng = numpy_generator(settings.seed, Stream.SHUFFLED_ARM)
        seeds = [instance.seed for instance in instances]
        played = play(shuffle_actions(stack_actions(play_again().logs), seeds, rng))
        return ArmResults(environment_steps, measure_arm(played, suite).outcomes)

    def search(count_steps: CountSteps) -> ArmResults:
        """The best fixed sequence found with the training budget of the policy."""
        sequence, taken = search_sequence(config, environment_steps, settings.seed, workers, count_steps)
        return ArmResults(taken, measure_arm(play(sequence), suite).outcomes)

    def train(arm: str, networks: Sequence[Fossils], decisions: Sequence[int], steps: int) -> ArmResults:
        static = [StaticNetwork(*network) for network in zip(instances, networks, decisions, strict=True)]
        return ArmResults(steps, [result for result, _ in train_static(workers, config, arm, static)])

    def train_final(_: CountSteps) -> ArmResults:
        """The policy's final networks, trained from scratch on as many minibatches."""
        lengths = np.concatenate([np.sum(log.running, axis=0) for log in play_again().logs])
        return train(STATIC, measure_policy().fossils, lengths.tolist(), environment_steps)

    def train_for_equal_flops(arm: str, networks: Sequence[Fossils], steps: int) -> ArmResults:
        """Networks trained with the training FLOPs of the policy's, rounded to whole decisions."""
        prices = Prices(suite)
        decisions = [
            max(round(flops / (TRAINING_PASSES * prices.examples * prices.network(instance, fossils))), 1)
            for flops, instance, fossils in zip(measure_policy().flops, instances, networks, strict=True)
        ]
        return train(arm, networks, decisions, steps)

    followers: dict[str, Callable[[CountSteps], ArmResults]] = {
        SHUFFLED: shuffle,
        SEQUENCE: search,
        STATIC: train_final,
        STATIC_EQUAL_FLOPS: lambda _: train_for_equal_flops(
            STATIC_EQUAL_FLOPS, measure_policy().fossils, environment_steps
        ),
        NONE_EQUAL_FLOPS: lambda _: train_for_equal_flops(NONE_EQUAL_FLOPS, [()] * len(instances), 0),
    }
    return [
        _Job(
            arm=arm,
            folder=run.path,
            key=_arm_key(arm, settings, policy.sha256, instances),
            steps=len(instances) * suite.steps + (environment_steps if arm == SEQUENCE else 0),
            compute=compute,
            label=f"{arm}, seed {settings.seed}",
        )
        for arm, compute in followers.items()
    ]


# The search for a fixed sequence


def search_sequence(
    config: EvaluationConfig, environment_steps: int, seed: int, workers: Workers, count_steps: CountSteps
) -> tuple[Schedule, int]:
    """Random search for a fixed sequence by sequential halving on training instances (Karnin et al. 2013, ICML).

    All rounds have the same number of steps. In a round, all candidates run on the same new instances, and one in
    `SURVIVORS` survives. Returns the winner and the steps taken.
    """
    suite, rng = get_suite(config.suite), numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    rounds, first = plan_rounds(environment_steps // suite.steps)
    drawn = [make_schedule(suite, draw_plantings(suite, rng)) for _ in range(first - 1)]
    candidates: list[Schedule] = [make_schedule(suite, []), *drawn]
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        scores, taken = score_controllers(candidates, config, suite.sample(count, "train", rng), workers)
        count_steps(taken)
        left -= taken
        # The last round has at least two finalists, so that it decides something.
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        order: list[int] = scores.argsort()[::-1][:survivors].tolist()
        candidates = [candidates[index] for index in order]
    return candidates[0], environment_steps - left


def plan_rounds(episodes: int) -> tuple[int, int]:
    """The rounds that ``episodes`` allow, and the candidates in the first one."""
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    return rounds, max(episodes // (rounds * FIRST_ROUND), 1)


def score_controllers(
    controllers: Sequence[Controller], config: EvaluationConfig, instances: Sequence[Instance], workers: Workers
) -> tuple[Floats, int]:
    """Mean scores with equal weights for all families, and the steps taken."""
    weights, results = family_weights(instances), evaluate_controllers(workers, controllers, config, instances)
    scores = np.array([np.array([record.score for record in result.records]) @ weights for result in results])
    return scores, sum(int(np.sum(log.running)) for result in results for log in result.logs)


def draw_plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    """Plantings in different slots: half of them at once, the others at a random step."""
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    latest = round(0.6 * suite.steps)  # leaves time to earn the rent
    return [
        Planting(
            0 if rng.random() < 0.5 else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]
