"""Everybody whom a learned policy has to beat before it may claim that control pays, on the same instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.rules.schedule import Planting, Schedule
from esper.control.rules.simple import SHUFFLED, shuffle_actions
from esper.experiments.baselines import baseline_settings, baselines
from esper.experiments.bench_suite import family_weights
from esper.experiments.contest import WHAT, Contest, Trial
from esper.experiments.episode_log import stack_actions
from esper.experiments.evaluate import load_policy
from esper.experiments.evaluation import EvaluationConfig, EvaluationResult, evaluate_controllers, evaluation_config
from esper.experiments.results import Arm, ArmResults, Result, cache_key, load_or_compute
from esper.experiments.schedules import MOST_PLANTINGS, schedule_of
from esper.experiments.settings import TrainSettings
from esper.experiments.static_networks import (
    TRAINING_PASSES,
    MeasuredArm,
    Prices,
    StaticNetwork,
    examples_per_decision,
    measure_arm,
    train_static,
)
from esper.experiments.summary import summarise
from esper.experiments.tuning import FIRST_ROUND, SURVIVORS
from esper.experiments.workers import LOCAL, Backend, Workers
from esper.random_streams import Stream, numpy_generator
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Suite
from esper.telemetry.lock import hold
from esper.telemetry.reader import RunReader
from esper.telemetry.run_directory import RunDirectory
from esper.training.population import Fossils

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
    terms: EvaluationConfig, environment_steps: int, seed: int, workers: Workers, spent: Callable[[int], None]
) -> FoundSequence:
    """Random search by sequential halving on training instances (Karnin et al. 2013, ICML).

    Rounds share the steps equally, and within a round all candidates play the same fresh instances; one in `SURVIVORS`
    goes on. Every step that is taken counts. ``spent`` is told the steps of each round.
    """
    suite = get_suite(terms.suite)
    rng = numpy_generator(seed, Stream.SEQUENCE_SEARCH)
    episodes = environment_steps // suite.steps
    rounds = 1
    while SURVIVORS**rounds * FIRST_ROUND * (rounds + 1) <= episodes:
        rounds += 1
    candidates = _candidates(suite, max(episodes // (rounds * FIRST_ROUND), 1), rng)
    left = environment_steps
    for remaining in range(rounds, 0, -1):
        count = left // suite.steps // remaining // len(candidates)
        if not count:
            break
        instances = suite.sample(count, "train", rng)
        weights = family_weights(instances)
        played = evaluate_controllers(workers, candidates, terms, instances)
        taken = sum(int(np.sum(tally.running)) for one in played for tally in one.tallies)
        spent(taken)
        left -= taken
        scores = np.array([np.array([record.score for record in one.records]) @ weights for one in played])
        order: list[int] = scores.argsort()[::-1].tolist()
        survivors = 1 if remaining == 1 else max(-(-len(candidates) // SURVIVORS), FINALISTS)
        candidates = [candidates[index] for index in order[:survivors]]
    return FoundSequence(candidates[0], environment_steps - left)


def _candidates(suite: Suite, count: int, rng: np.random.Generator) -> list[Schedule]:
    """Doing nothing, and random plantings in up to `MOST_PLANTINGS` different slots."""
    return [schedule_of(suite, []), *(schedule_of(suite, _plantings(suite, rng)) for _ in range(count - 1))]


def _plantings(suite: Suite, rng: np.random.Generator) -> list[Planting]:
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


class TrainedPolicy:
    """A run that is done, on the instances of a contest; ``spent`` is told the environment steps of searches.

    Raises:
        CheckpointError, RunError: the run has no usable policy, or its store is damaged.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: TrainSettings,
        instances: Sequence[Instance],
        workers: Workers,
        spent: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._suite = get_suite(settings.suite)
        self._terms = evaluation_config(settings)
        self._instances = instances
        self._workers = workers
        self._spent = spent
        self._policy = load_policy(run, settings)
        self.sha256 = self._policy.sha256
        """Of the policy's checkpoint."""
        with RunReader.open(run.store) as reader:
            self.environment_steps = summarise(reader).environment_steps
            """Of the policy's training, a start by imitation included."""

    @cached_property
    def _played(self) -> EvaluationResult:
        return evaluate_controllers(self._workers, [self._policy.controller], self._terms, self._instances)[0]

    @cached_property
    def _shown(self) -> MeasuredArm:
        return measure_arm(self._played, self._suite)

    def policy(self) -> ArmResults:
        """The policy itself."""
        return ArmResults(self.environment_steps, self._shown.outcomes)

    def shuffled(self) -> ArmResults:
        """The policy's own actions, each instance's played on another one."""
        rng = numpy_generator(self._settings.seed, Stream.SHUFFLED_ARM)
        controller = shuffle_actions(
            stack_actions(self._played.tallies), [instance.seed for instance in self._instances], rng
        )
        played = evaluate_controllers(self._workers, [controller], self._terms, self._instances)[0]
        return ArmResults(self.environment_steps, measure_arm(played, self._suite).outcomes)

    def sequence(self) -> ArmResults:
        """The best fixed sequence found with the policy's own budget."""
        found = search_sequence(self._terms, self.environment_steps, self._settings.seed, self._workers, self._spent)
        played = evaluate_controllers(self._workers, [found.sequence], self._terms, self._instances)[0]
        return ArmResults(found.environment_steps, measure_arm(played, self._suite).outcomes)

    def static(self) -> ArmResults:
        """The policy's final networks from scratch, for the same minibatches."""
        lengths = np.concatenate([np.sum(tally.running, axis=0) for tally in self._played.tallies])
        outcomes = self._fixed(STATIC, self._final_fossils, lengths.tolist())
        return ArmResults(self.environment_steps, outcomes)

    def static_equal_flops(self) -> ArmResults:
        """The policy's final networks from scratch, for as many FLOPs as the policy's networks took to train."""
        fossils = self._final_fossils
        outcomes = self._fixed(STATIC_EQUAL_FLOPS, fossils, self._affordable(fossils))
        return ArmResults(self.environment_steps, outcomes)

    def none_equal_flops(self) -> ArmResults:
        """Hosts that never grow, for as many FLOPs as the policy's networks took to train."""
        bare: list[Fossils] = [()] * len(self._instances)
        return ArmResults(0, self._fixed(NONE_EQUAL_FLOPS, bare, self._affordable(bare)))

    @property
    def _final_fossils(self) -> list[Fossils]:
        return [fossils for slots in self._shown.slots for fossils in slots.fossils]

    def _affordable(self, fossils: Sequence[Fossils]) -> list[int]:
        """Decisions for which each network can be trained with what its instance cost the policy, to the nearest."""
        prices, examples = Prices(self._suite), examples_per_decision(self._suite)
        return [
            max(round(flops / (TRAINING_PASSES * examples * prices.network(instance, own))), 1)
            for flops, instance, own in zip(self._shown.flops, self._instances, fossils, strict=True)
        ]

    def _fixed(self, arm: str, fossils: Sequence[Fossils], decisions: Sequence[int]) -> list[Result]:
        networks = [StaticNetwork(*one) for one in zip(self._instances, fossils, decisions, strict=True)]
        return train_static(self._workers, self._terms, arm, networks)


POLICY = LearnedController.name
_FOLDER = "arms"

Progress = Callable[[int, int, str], None]
"""Told the environment steps done, of how many, and what is under way (empty at the end)."""


@dataclass(frozen=True)
class _Job:
    """An arm, of one training seed if it depends on them."""

    arm: str
    what: str
    steps: int
    """Environment steps that it takes, about."""
    place: Path
    """Where its file lies."""
    lock: Path
    under: str
    """The cache_key."""
    compute: Callable[[], ArmResults]


class _Meter:
    """Adds up the steps of jobs."""

    def __init__(self, tell: Progress) -> None:
        self._tell, self._begun, self._total, self._what = tell, 0, 0, ""

    def begin(self, what: str, begun: int, total: int) -> None:
        self._what, self._begun, self._total = what, begun, total
        self.add(0)

    def add(self, steps: int) -> None:
        self._begun += steps
        self._tell(self._begun, self._total, self._what)


def run_arms(contest: Contest, progress: Progress, backend: Backend = LOCAL) -> list[Arm]:
    """The policy first, then all other arms; what is done already is only read.

    The contest's trials must be done.

    Raises:
        CheckpointError, RunError: a trial has no usable policy, or a file cannot be written.
    """
    instances, name = contest.played(), next(iter(contest.arms))
    meter, settings = _Meter(progress), contest.arms[name]
    with backend.open(settings.shards) as workers:
        folder, controllers = contest.folder / name, baselines(get_suite(contest.suite))
        jobs = [_of_baseline(one, folder, settings, instances, workers) for one in controllers]
        for seed in range(contest.seeds):
            run, own = RunDirectory(contest.path(Trial(name, seed))), contest.settings(Trial(name, seed))
            jobs += _of_policy(TrainedPolicy(run, own, instances, workers, meter.add), run, own, instances)
        total, begun = sum(job.steps for job in jobs), 0
        found: dict[str, list[ArmResults]] = {}
        for job in jobs:
            meter.begin(job.what, begun, total)
            with hold(job.lock, WHAT):
                records = load_or_compute(job.place / _FOLDER / f"{job.arm}.json", job.under, instances, job.compute)
            found.setdefault(job.arm, []).append(records)
            begun += job.steps
    progress(total, total, "")
    return [Arm(POLICY, found.pop(POLICY)), *(Arm(arm, records) for arm, records in found.items())]


def _of_policy(
    policy: TrainedPolicy, run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance]
) -> Iterator[_Job]:
    """The policy of one training seed, and the arms that follow from it."""
    ways = {
        POLICY: policy.policy,
        SHUFFLED: policy.shuffled,
        SEQUENCE: policy.sequence,
        STATIC: policy.static,
        STATIC_EQUAL_FLOPS: policy.static_equal_flops,
        NONE_EQUAL_FLOPS: policy.none_equal_flops,
    }
    played = _played_steps(settings, instances)
    for arm, compute in ways.items():
        under = cache_key(arm, policy.sha256, settings.model_dump(mode="json"), _described(instances))
        steps = played + (policy.environment_steps if arm == SEQUENCE else 0)
        yield _Job(arm, f"{arm}, seed {settings.seed}", steps, run.path, run.lock, under, compute)


def _of_baseline(
    controller: Controller, folder: Path, settings: TrainSettings, instances: Sequence[Instance], workers: Workers
) -> _Job:
    """An arm that does not depend on training seeds."""
    suite, terms, arm = get_suite(settings.suite), evaluation_config(settings), controller.name
    known = baseline_settings(suite)

    def compute() -> ArmResults:
        played = evaluate_controllers(workers, [controller], terms, instances)[0]
        return ArmResults(known.environment_steps.get(arm, 0), measure_arm(played, suite).outcomes)

    facts = [part.model_dump(mode="json") for part in (known, terms.rules, terms.conduct)]
    under = cache_key(arm, facts, _described(instances))
    return _Job(arm, arm, _played_steps(settings, instances), folder, folder / "arms.lock", under, compute)


def _played_steps(settings: TrainSettings, instances: Sequence[Instance]) -> int:
    return len(instances) * get_suite(settings.suite).steps


def _described(instances: Sequence[Instance]) -> list[object]:
    return [instance.to_json() for instance in instances]
