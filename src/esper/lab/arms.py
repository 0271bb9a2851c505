"""Everybody whom a learned policy has to beat before it may claim that control pays, on the same instances.

Baselines; and what follows from the policy of each training seed: its own actions shuffled, the best fixed sequence
that its budget finds, networks of fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from esper.control.controller import Controller
from esper.control.learned import POLICY
from esper.control.rules import SHUFFLED, Planting, Schedule, shuffle_actions
from esper.engine.budget import TRAINING_PASSES
from esper.lab.bench_suite import MOST_PLANTINGS, family_weights, schedule_of
from esper.lab.evaluate import count_trainings, load_policy
from esper.lab.experiment import WHAT, Experiment, Trial, arm_file, arm_key, play_policy
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

SURVIVORS = 4
"""One candidate in this many goes on to the next round."""
FIRST_ROUND = 21
"""Instances per candidate in the first round, about."""
FINALISTS = 2
"""The last round decides between at least as many."""
LATEST = 0.6
"""Share of the episode after which nothing is planted: what comes later has hardly time to earn its rent."""
EARLY = 0.5
"""Share of the plantings that are as early as can be."""


@dataclass(frozen=True)
class FoundSequence:
    """The winner of a search."""

    sequence: Schedule
    environment_steps: int
    """What the search took: the budget, less a remainder that is too small for a fair comparison of the finalists."""


def search_sequence(
    config: EvaluationConfig,
    environment_steps: int,
    seed: int,
    workers: Workers,
    on_round: Callable[[int], None],
) -> FoundSequence:
    """Random search for a fixed sequence by sequential halving on training instances (Karnin et al. 2013, ICML).

    Rounds share the steps equally, and within a round all candidates play the same fresh instances; one in `SURVIVORS`
    goes on. Every step that is taken counts. ``on_round`` is called with the steps of each round.
    """
    suite, rng = get_suite(config.suite), numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    rounds, first = plan_rounds(environment_steps // suite.steps)
    drawn = [schedule_of(suite, draw_plantings(suite, rng)) for _ in range(first - 1)]
    candidates: list[Schedule] = [schedule_of(suite, []), *drawn]
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        scores, taken = score_controllers(candidates, config, suite.sample(count, "train", rng), workers)
        on_round(taken)
        left -= taken
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        order: list[int] = scores.argsort()[::-1][:survivors].tolist()
        candidates = [candidates[index] for index in order]
    return FoundSequence(candidates[0], environment_steps - left)


def plan_rounds(episodes: int) -> tuple[int, int]:
    """How many rounds that many episodes allow, and how many candidates in the first."""
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    return rounds, max(episodes // (rounds * FIRST_ROUND), 1)


def score_controllers(
    controllers: Sequence[Controller], config: EvaluationConfig, instances: Sequence[Instance], workers: Workers
) -> tuple[Floats, int]:
    """Mean scores, every family weighing the same, and the steps that were taken."""
    weights, results = family_weights(instances), evaluate_controllers(workers, controllers, config, instances)
    scores = np.array([np.array([record.score for record in one.records]) @ weights for one in results])
    return scores, sum(int(np.sum(log.running)) for one in results for log in one.logs)


def draw_plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
    """Plantings in up to `MOST_PLANTINGS` different slots."""
    most = min(MOST_PLANTINGS, len(suite.sites))
    slots: list[int] = rng.permutation(len(suite.sites))[: int(rng.integers(1, most + 1))].tolist()
    latest = round(LATEST * suite.steps)
    return [
        Planting(
            0 if rng.random() < EARLY else int(rng.integers(latest + 1)), slot, int(rng.integers(len(suite.blueprints)))
        )
        for slot in slots
    ]


SEQUENCE = "sequence"
STATIC = "static"
STATIC_EQUAL_FLOPS = "static_equal_flops"
NONE_EQUAL_FLOPS = "none_equal_flops"

Progress = Callable[[int, int, str], None]
"""Told the environment steps done, of how many, and what is under way (empty at the end)."""
Spent = Callable[[int], None]
"""Told the environment steps that a search has taken since it last told."""


@dataclass(frozen=True)
class _Job:
    """An arm, of one training seed if it depends on them."""

    arm: str
    what: str
    steps: int
    """Environment steps that it takes, about."""
    path: Path
    key: str
    compute: Callable[[Spent], ArmResults]


def run_arms(experiment: Experiment, progress: Progress, backend: Backend = LOCAL) -> list[Arm]:
    """The first configuration's policy, then all other arms; what is done already is only read.

    The experiment's trials must be done.

    Raises:
        CheckpointError, RunError: a trial has no usable policy, or a file cannot be written.
    """
    instances, name = experiment.sample_instances(), next(iter(experiment.arms))
    settings, folder = experiment.arms[name], experiment.folder / name
    controllers = create_baselines(get_suite(experiment.suite))
    found: dict[str, list[ArmResults]] = {}
    with hold_lock(folder / "arms.lock", WHAT), backend.open_workers(settings.shards) as workers:
        jobs = [_play_baseline(one, folder, settings, instances, workers) for one in controllers]
        for seed in range(experiment.seeds):
            trial = Trial(name, seed)
            run, own = RunDirectory(experiment.path(trial)), experiment.settings(trial)
            policy = play_policy(run, own, instances, workers)
            found.setdefault(POLICY, []).append(policy)
            jobs += _PolicyFollowers(run, own, instances, workers, policy.environment_steps).jobs()
        begun, total = 0, sum(job.steps for job in jobs)
        for job in jobs:
            spent = _count_steps(progress, begun, total, job.what)

            def compute(job: _Job = job, spent: Spent = spent) -> ArmResults:
                return job.compute(spent)

            found.setdefault(job.arm, []).append(load_or_compute(job.path, job.key, compute))
            begun += job.steps
    progress(total, total, "")
    return [Arm(arm, results) for arm, results in found.items()]


def _count_steps(progress: Progress, begun: int, total: int, what: str) -> Spent:
    def spent(steps: int) -> None:
        nonlocal begun
        begun += steps
        progress(begun, total, what)

    spent(0)
    return spent


def _play_baseline(
    controller: Controller, folder: Path, settings: TrainSettings, instances: Sequence[Instance], workers: Workers
) -> _Job:
    """An arm that does not depend on training seeds."""
    suite, arm = get_suite(settings.suite), controller.name
    searched = round(count_trainings(arm, suite) * suite.steps)

    def compute(_: Spent) -> ArmResults:
        played = evaluate_controllers(workers, [controller], make_evaluation_config(settings), instances)[0]
        return ArmResults(searched, measure_arm(played, suite).outcomes)

    key = arm_key(arm, settings, "", instances)
    return _Job(arm, arm, len(instances) * suite.steps, arm_file(folder, arm), key, compute)


class _PolicyFollowers:
    """The arms that follow from the policy of one training seed, which took so many environment steps.

    Raises:
        CheckpointError: the run has no usable policy.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: TrainSettings,
        instances: Sequence[Instance],
        workers: Workers,
        environment_steps: int,
    ) -> None:
        self._run, self._settings, self._instances, self._workers = run, settings, instances, workers
        self._steps = environment_steps
        self._suite, self._terms = get_suite(settings.suite), make_evaluation_config(settings)
        self._policy = load_policy(run, settings)

    def jobs(self) -> list[_Job]:
        """The jobs, in the order in which they are to be done."""
        ways = {
            SHUFFLED: self._shuffle,
            SEQUENCE: self._search,
            STATIC: self._train_final,
            STATIC_EQUAL_FLOPS: self._train_final_for_equal_flops,
            NONE_EQUAL_FLOPS: self._train_hosts_for_equal_flops,
        }
        played = len(self._instances) * self._suite.steps
        return [
            _Job(
                arm,
                f"{arm}, seed {self._settings.seed}",
                played + (self._steps if arm == SEQUENCE else 0),
                arm_file(self._run.path, arm),
                arm_key(arm, self._settings, self._policy.sha256, self._instances),
                compute,
            )
            for arm, compute in ways.items()
        ]

    def _play(self, controller: Controller) -> EvaluationResult:
        return evaluate_controllers(self._workers, [controller], self._terms, self._instances)[0]

    @cached_property
    def _played(self) -> EvaluationResult:
        return self._play(self._policy.controller)

    @cached_property
    def _measured(self) -> MeasuredArm:
        return measure_arm(self._played, self._suite)

    def _shuffle(self, _: Spent) -> ArmResults:
        """The policy's own actions, each instance's played on another one."""
        rng = numpy_generator(self._settings.seed, Stream.SHUFFLED_ARM)
        seeds = [instance.seed for instance in self._instances]
        played = self._play(shuffle_actions(stack_actions(self._played.logs), seeds, rng))
        return ArmResults(self._steps, measure_arm(played, self._suite).outcomes)

    def _search(self, spent: Spent) -> ArmResults:
        """The best fixed sequence found with the policy's own budget."""
        search = search_sequence(self._terms, self._steps, self._settings.seed, self._workers, spent)
        return ArmResults(search.environment_steps, measure_arm(self._play(search.sequence), self._suite).outcomes)

    def _train_final(self, _: Spent) -> ArmResults:
        """The policy's final networks from scratch, for the same minibatches."""
        lengths = np.concatenate([np.sum(log.running, axis=0) for log in self._played.logs])
        return ArmResults(self._steps, self._train(STATIC, self._final_fossils, lengths.tolist()))

    def _train_final_for_equal_flops(self, _: Spent) -> ArmResults:
        """The policy's final networks from scratch, for as many FLOPs as the policy's networks took to train."""
        fossils = self._final_fossils
        return ArmResults(self._steps, self._train(STATIC_EQUAL_FLOPS, fossils, self._affordable(fossils)))

    def _train_hosts_for_equal_flops(self, _: Spent) -> ArmResults:
        """Hosts that never grow, for as many FLOPs as the policy's networks took to train."""
        bare: list[Fossils] = [()] * len(self._instances)
        return ArmResults(0, self._train(NONE_EQUAL_FLOPS, bare, self._affordable(bare)))

    @property
    def _final_fossils(self) -> list[Fossils]:
        return [fossils for slots in self._measured.slots for fossils in slots.fossils]

    def _affordable(self, fossils: Sequence[Fossils]) -> list[int]:
        """Decisions for which each network can be trained with what its instance cost the policy, to the nearest."""
        prices, examples = Prices(self._suite), examples_per_decision(self._suite)
        return [
            max(round(flops / (TRAINING_PASSES * examples * prices.network(instance, own))), 1)
            for flops, instance, own in zip(self._measured.flops, self._instances, fossils, strict=True)
        ]

    def _train(self, arm: str, fossils: Sequence[Fossils], decisions: Sequence[int]) -> list[Result]:
        networks = [StaticNetwork(*one) for one in zip(self._instances, fossils, decisions, strict=True)]
        return train_static(self._workers, self._terms, arm, networks)
