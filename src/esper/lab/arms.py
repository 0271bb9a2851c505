"""All arms that a learned policy must beat on the same instances before one can claim that control pays.

They are the baselines, and arms that depend on the policy of each training seed: its own actions shuffled, the best
fixed sequence found with its budget, and networks of fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType

import numpy as np

from esper.control.controller import Controller
from esper.control.learned import POLICY
from esper.control.own import hash_file, is_in_file, load_controller
from esper.control.rules import SHUFFLED, Planting, Schedule, shuffle_actions
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError
from esper.lab.bench_suite import MOST_PLANTINGS, family_weights, make_schedule
from esper.lab.evaluate import count_trainings, load_policy
from esper.lab.experiment import LOCK_OWNER, Experiment, Trial, arm_file, arm_key, play_policy
from esper.lab.static_networks import (
    MeasuredArm,
    Prices,
    StaticNetwork,
    examples_per_decision,
    measure_arm,
    train_static,
)
from esper.numerics.arrays import Floats
from esper.numerics.random_streams import Stream, numpy_generator
from esper.population.population import Fossils
from esper.runs.run_directory import RunDirectory, hold_lock
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.train.episode_log import stack_actions
from esper.train.evaluation import (
    EvaluationConfig,
    EvaluationResult,
    create_baselines,
    evaluate_controllers,
    make_evaluation_config,
)
from esper.train.results import Arm, ArmResults, Result, load_or_compute
from esper.train.settings import TrainSettings
from esper.train.workers import LOCAL, Backend, Workers

# Names of the arms that depend on a policy.
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
LATEST = 0.6
"""Fraction of the episode after which nothing is planted, because too little time is left to earn the rent."""
EARLY = 0.5
"""Fraction of the plantings that are as early as possible."""

Progress = Callable[[int, int, str], None]
"""Called with the environment steps done, their total number, and the current arm (empty at the end)."""
CountSteps = Callable[[int], None]
"""Called with the number of environment steps that a search has taken since the last call."""


@dataclass(frozen=True)
class _Job:
    """An arm to compute, for one training seed if it depends on training seeds."""

    arm: str
    run: RunDirectory
    """Where its results are stored: the run whose policy it depends on, or the configuration's folder."""
    key: str
    steps: int
    """Approximate number of environment steps that it takes."""
    compute: Callable[[CountSteps], ArmResults]
    label: str


def load_own_controllers(experiment: Experiment, addresses: Sequence[str]) -> dict[str, Controller]:
    """Load the user's controllers for the experiment's suite, by their ``FILE.py:NAME``."""
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
    progress: Progress,
    backend: Backend = LOCAL,
    own: Mapping[str, Controller] = MappingProxyType({}),
) -> list[Arm]:
    """The arms of an experiment: the first configuration's policy, then all others; stored results are reused.

    The experiment's trials must be done. ``own`` are the user's controllers, by their ``FILE.py:NAME``.
    """
    instances, name = experiment.sample_instances(), next(iter(experiment.arms))
    settings, folder, suite = experiment.arms[name], experiment.folder / name, get_suite(experiment.suite)
    results: dict[str, list[ArmResults]] = {}
    with hold_lock(folder / "arms.lock", LOCK_OWNER), backend.open_workers(settings.shards) as workers:
        # Baselines and the user's controllers run once; all other arms depend on the policy of each training seed.
        players = [("", controller) for controller in create_baselines(suite)] + list(own.items())
        jobs = [
            _Job(
                arm=controller.name,
                run=RunDirectory(folder),
                key=arm_key(controller.name, settings, hash_file(address) if address else "", instances),
                steps=len(instances) * suite.steps,
                compute=partial(_play_baseline, controller, address or controller.name, settings, instances, workers),
                label=controller.name,
            )
            for address, controller in players
        ]
        for seed in range(experiment.seeds):
            trial = Trial(name, seed)
            run, seeded = RunDirectory(experiment.path(trial)), experiment.settings(trial)
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
            results.setdefault(job.arm, []).append(load_or_compute(arm_file(job.run.path, job.arm), job.key, compute))
            done += job.steps
    progress(total, total, "")
    return [Arm(arm, seeds) for arm, seeds in results.items()]


def _play_baseline(
    controller: Controller,
    name: str,
    settings: TrainSettings,
    instances: Sequence[Instance],
    workers: Workers,
    _: CountSteps,
) -> ArmResults:
    suite = get_suite(settings.suite)
    # The search for a tuned baseline's settings counts as its cost.
    searched = round(count_trainings(name, suite) * suite.steps)
    played = evaluate_controllers(workers, [controller], make_evaluation_config(settings), instances)[0]
    return ArmResults(searched, measure_arm(played, suite).outcomes)


def _list_followers(
    run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance], workers: Workers, environment_steps: int
) -> list[_Job]:
    """The arms that depend on the policy of one training seed, which took ``environment_steps``, in order."""
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
        """The policy's own actions, with those of each instance applied to another instance."""
        rng = numpy_generator(settings.seed, Stream.SHUFFLED_ARM)
        seeds = [instance.seed for instance in instances]
        played = play(shuffle_actions(stack_actions(play_again().logs), seeds, rng))
        return ArmResults(environment_steps, measure_arm(played, suite).outcomes)

    def search(count_steps: CountSteps) -> ArmResults:
        """The best fixed sequence found with the training budget of the policy."""
        sequence, taken = search_sequence(config, environment_steps, settings.seed, workers, count_steps)
        return ArmResults(taken, measure_arm(play(sequence), suite).outcomes)

    def train(arm: str, networks: Sequence[Fossils], decisions: Sequence[int]) -> list[Result]:
        static = [StaticNetwork(*network) for network in zip(instances, networks, decisions, strict=True)]
        return train_static(workers, config, arm, static)

    def afford(networks: Sequence[Fossils]) -> list[int]:
        """Number of decisions for which each network can train with the FLOPs of the policy's network, rounded."""
        prices, examples = Prices(suite), examples_per_decision(suite)
        return [
            max(round(flops / (TRAINING_PASSES * examples * prices.network(instance, fossils))), 1)
            for flops, instance, fossils in zip(measure_policy().flops, instances, networks, strict=True)
        ]

    def train_final(_: CountSteps) -> ArmResults:
        """The policy's final networks, trained from scratch on the same number of minibatches."""
        lengths = np.concatenate([np.sum(log.running, axis=0) for log in play_again().logs])
        return ArmResults(environment_steps, train(STATIC, measure_policy().fossils, lengths.tolist()))

    def train_for_equal_flops(arm: str) -> ArmResults:
        """Those networks or hosts that never grow, trained with the training FLOPs of the policy's networks."""
        if arm == NONE_EQUAL_FLOPS:
            networks, steps = [()] * len(instances), 0
        else:
            networks, steps = measure_policy().fossils, environment_steps
        return ArmResults(steps, train(arm, networks, afford(networks)))

    followers: dict[str, Callable[[CountSteps], ArmResults]] = {
        SHUFFLED: shuffle,
        SEQUENCE: search,
        STATIC: train_final,
        STATIC_EQUAL_FLOPS: lambda _: train_for_equal_flops(STATIC_EQUAL_FLOPS),
        NONE_EQUAL_FLOPS: lambda _: train_for_equal_flops(NONE_EQUAL_FLOPS),
    }
    return [
        _Job(
            arm=arm,
            run=run,
            key=arm_key(arm, settings, policy.sha256, instances),
            steps=len(instances) * suite.steps + (environment_steps if arm == SEQUENCE else 0),
            compute=compute,
            label=f"{arm}, seed {settings.seed}",
        )
        for arm, compute in followers.items()
    ]


# The search for a fixed sequence --------------------------------------------------------------------------------------


def search_sequence(
    config: EvaluationConfig, environment_steps: int, seed: int, workers: Workers, count_steps: CountSteps
) -> tuple[Schedule, int]:
    """Random search for a fixed sequence by sequential halving on training instances (Karnin et al. 2013, ICML).

    All rounds have the same number of steps. Within a round, all candidates run on the same new instances, and one in
    `SURVIVORS` survives. Returns the winner and the steps taken: the budget less what is too little for a fair round.
    """
    suite, rng = get_suite(config.suite), numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    # Doing nothing is always a candidate.
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
    """The number of rounds that ``episodes`` allow, and the number of candidates in the first round."""
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    return rounds, max(episodes // (rounds * FIRST_ROUND), 1)


def score_controllers(
    controllers: Sequence[Controller], config: EvaluationConfig, instances: Sequence[Instance], workers: Workers
) -> tuple[Floats, int]:
    """Mean scores with equal weights for all families, and the number of steps taken."""
    weights, results = family_weights(instances), evaluate_controllers(workers, controllers, config, instances)
    scores = np.array([np.array([record.score for record in result.records]) @ weights for result in results])
    return scores, sum(int(np.sum(log.running)) for result in results for log in result.logs)


def draw_plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    """Plantings in up to `MOST_PLANTINGS` different slots."""
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    # Half of the plantings are immediate, the others at a random step that leaves time to earn the rent.
    latest = round(LATEST * suite.steps)
    return [
        Planting(
            0 if rng.random() < EARLY else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]
