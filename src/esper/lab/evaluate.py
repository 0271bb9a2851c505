"""Compare a run's policy, or a controller by its name, with the baselines on instances that nobody trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from esper.config.loading import load_settings
from esper.config.settings import compare_settings
from esper.control.controller import Controller
from esper.control.learned import POLICY, LearnedController, restore_policy
from esper.control.rules import SHUFFLED, Replay, shuffle_actions
from esper.control.shipped import ESPER, open_policy
from esper.errors import ConfigError, RunError
from esper.lab.behaviour import Behaviour, describe_behaviour, read_behaviour, write_behaviour
from esper.lab.comparison import Comparison, compare_controllers, compare_over_seeds
from esper.lifecycle.rules import Rules
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.run_directory import RunDirectory
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite
from esper.train.collect import create_greedy_controller
from esper.train.episode_log import stack_actions
from esper.train.evaluation import (
    CohortTask,
    EvaluationConfig,
    EvaluationProgress,
    EvaluationResult,
    create_baselines,
    describe_evaluation_inputs,
    evaluate_controllers,
    join_cohorts,
    load_baseline_settings,
    make_evaluation_config,
    split_into_cohorts,
)
from esper.train.results import SPLITS, Result, read_evaluation, select_split, write_results
from esper.train.settings import TrainSettings
from esper.train.workers import Workers

_STREAMS: dict[Split, Stream] = {"heldout": Stream.HELDOUT_INSTANCES, "transfer": Stream.TRANSFER_INSTANCES}
HELDOUT_INSTANCES = 256
TRANSFER_INSTANCES = 64
FEWEST_INSTANCES = 2
"""Fewest instances of an evaluation: one alone has no interval."""

Progress = Callable[[int, int, str], None]
"""Told how many controllers have played, of how many, and which one plays next (empty at the end)."""

TakenOver = Callable[[int, int], None]
"""Told once how many cohorts an earlier evaluation has played already, of how many."""


class LoadedPolicy(NamedTuple):
    """A run's newest policy, greedy, the training iterations it had, and the hash of its checkpoint."""

    controller: LearnedController
    iteration: int
    sha256: str


@dataclass(frozen=True)
class RunEvaluation:
    """What all controllers scored, and what the policy did."""

    results: list[Result]
    behaviour: Behaviour


class _Game(NamedTuple):
    split: Split
    controller: Controller
    cohorts: list[CohortTask]


def load_policy(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
    """The policy of the newest checkpoint.

    Raises:
        CheckpointError: there is no usable checkpoint, or it belongs to other settings.
    """
    checkpoint = Checkpoints(run.checkpoints).latest()
    policy = restore_policy(checkpoint.tensors, settings.policy, settings.promise)
    return LoadedPolicy(create_greedy_controller(policy, settings), checkpoint.iteration, checkpoint.sha256)


def instances_for(settings: TrainSettings, split: Split, count: int) -> list[Instance]:
    """The instances that all controllers of a run are evaluated on."""
    return sample_for_evaluation(get_suite(settings.suite), split, count, settings.seed)


def sample_for_evaluation(suite: Suite, split: Split, count: int, seed: int) -> list[Instance]:
    """So many instances of the split, which the seed draws."""
    return suite.sample(count, split, numpy_generator(seed, _STREAMS[split]))


def _ignore_progress(_done: int, _total: int, _current: str = "") -> None:
    """Progress that nobody watches."""


def evaluate_run(
    run: RunDirectory,
    workers: Workers,
    heldout: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    progress: Progress = _ignore_progress,
    taken_over: TakenOver = _ignore_progress,
) -> RunEvaluation:
    """Let the policy and all baselines play the same instances, and write the results into the run.

    So does ``shuffled``: the policy's own actions, each instance's played on another one. What the policy scores above
    it, it owes to looking.

    ``heldout`` counts instances of the families trained on, ``transfer`` those of others; 0 leaves transfer out. What
    the same evaluation finished before it was stopped is not played again.

    Raises:
        ConfigError: too few instances.
        CheckpointError: the run has no usable policy.
        RunError: the results cannot be written.
    """
    _check_counts(heldout, transfer)
    settings = load_settings(TrainSettings, run.config)
    suite = get_suite(settings.suite)
    policy = load_policy(run, settings)
    controllers = [policy.controller, *create_baselines(suite), Replay({}, SHUFFLED)]
    games = [
        game
        for split, count in zip(SPLITS, (heldout, transfer), strict=True)
        if count
        for game in _games(settings, split, count, controllers)
    ]
    tasks = [task for game in games for task in game.cohorts]
    finished = EvaluationProgress(run.evaluation_progress, describe_evaluation_inputs(settings, policy.sha256), tasks)
    taken_over(finished.cached_count, len(tasks))
    results: list[Result] = []
    own: list[tuple[Split, EvaluationResult]] = []
    for done, game in enumerate(games):
        progress(done, len(games), f"{game.controller.name}, {game.split} instances")
        if game.controller.name == SHUFFLED:
            game = _shuffle_game(game, settings, own[-1][1])
        played = join_cohorts(1, finished.evaluate_cohorts(workers, game.cohorts))[0]
        results += [replace(record, split=game.split) for record in played.records]
        if game.controller is policy.controller:
            own.append((game.split, played))
    progress(len(games), len(games), "")
    evaluation = RunEvaluation(results, describe_behaviour(suite, policy.iteration, own))
    run.verdicts.unlink(missing_ok=True)  # those of an earlier evaluation; new ones come with the report
    write_results(run.evaluation, evaluation.results)
    write_behaviour(run.behaviour, evaluation.behaviour)
    finished.remove()
    return evaluation


def _games(settings: TrainSettings, split: Split, count: int, controllers: Sequence[Controller]) -> list[_Game]:
    instances = instances_for(settings, split, count)
    terms = make_evaluation_config(settings)
    return [
        _Game(split, one, split_into_cohorts([one], terms, instances, with_shapley=one.name == POLICY))
        for one in controllers
    ]


def _shuffle_game(game: _Game, settings: TrainSettings, played: EvaluationResult) -> _Game:
    """The game in which the policy's own actions are played again, each instance's on another one of the split."""
    instances = [instance for task in game.cohorts for part in task.parts for instance in part.instances]
    rng = numpy_generator(settings.seed, _STREAMS[game.split], Stream.SHUFFLED_EVALUATION)
    controller = shuffle_actions(stack_actions(played.logs), [instance.seed for instance in instances], rng)
    return _Game(game.split, controller, split_into_cohorts([controller], make_evaluation_config(settings), instances))


def evaluate_by_name(name: str, suite: Suite, split: Split, count: int, seed: int, workers: Workers) -> Comparison:
    """A controller and the suite's baselines on so many of its instances, which the seed draws.

    ``name`` is that of a baseline, or the directory of a run, of this suite or another one.

    Raises:
        ConfigError: there is no such controller, or there are too few instances.
        TaskError: the suite has no families for that split.
        RunError, CheckpointError: the run is unusable.
    """
    _check_counts(count, 0)
    controller, terms = find_controller(name, suite)
    others = [one for one in create_baselines(suite) if one.name != controller.name]
    instances = sample_for_evaluation(suite, split, count, seed)
    played = evaluate_controllers(workers, [controller, *others], terms, instances)
    return compare_controllers([record for one in played for record in one.records], controller.name)


def find_controller(name: str, suite: Suite) -> tuple[Controller, EvaluationConfig]:
    """A baseline by its name or the policy of a run by its directory, and the terms that it knows.

    Raises:
        ConfigError: there is no such controller.
        RunError, CheckpointError: the run is unusable.
    """
    rules = {one.name: one for one in create_baselines(suite)}
    if name in rules:
        return rules[name], EvaluationConfig(suite.name, Rules())
    run = open_policy(name, tuple(rules))
    # The rule that advises a policy tells time by the horizon of what it plays.
    settings = load_settings(TrainSettings, run.config, [f"suite={suite.name}"])
    return load_policy(run, settings).controller, make_evaluation_config(settings)


def count_trainings(name: str, suite: Suite) -> float:
    """Whole trainings of networks that the controller of that name has cost: to learn, or to tune for this suite.

    Of a policy those of its own training, twins included, and of the one that it started from, as that is now; those
    of policies that it was chosen among are not counted.

    Raises:
        ConfigError: there is no such controller.
        RunError, CheckpointError: the run is unusable.
    """
    if name != ESPER and name in {one.name for one in create_baselines(suite)}:
        return load_baseline_settings(suite).environment_steps.get(name, 0) / suite.steps
    run = open_policy(name)
    settings = load_settings(TrainSettings, run.config)
    baselines = settings.environments // settings.ppo.group if settings.ppo.no_growth_baseline else 0
    each = settings.environments + baselines
    return Checkpoints(run.checkpoints).latest().iteration * each + count_pretraining(settings, suite)


def count_pretraining(settings: TrainSettings, suite: Suite) -> float:
    """Trainings that the policy had cost with which a run of these settings starts."""
    return 0.0 if settings.start_from is None else count_trainings(settings.start_from, suite)


def _check_counts(heldout: int, transfer: int) -> None:
    if heldout < FEWEST_INSTANCES:
        raise ConfigError(f"{heldout} instances give no interval: ask for at least {FEWEST_INSTANCES}")
    if transfer != 0 and transfer < FEWEST_INSTANCES:
        raise ConfigError(f"{transfer} transfer instances give no interval: ask for at least {FEWEST_INSTANCES}, or 0")


def read_over_seeds(paths: Sequence[Path]) -> dict[Split, Comparison]:
    """Several evaluated runs that differ in their training seed alone, by split that all were evaluated on.

    Raises:
        RunError: one is no run, is not evaluated, or they were evaluated differently or after other iterations.
        ConfigError: they differ in more than their seed, or two have the same one.
    """
    runs = [RunDirectory.open_training_run(path) for path in paths]
    _require_one_way(paths, [load_settings(TrainSettings, run.config) for run in runs])
    results = [read_evaluation(run.evaluation) for run in runs]
    _require_one_length(runs)
    comparisons: dict[Split, Comparison] = {}
    for split in SPLITS:
        played = [select_split(own, split) for own in results]
        if all(played):
            try:
                comparisons[split] = compare_over_seeds(played)
            except ValueError as error:
                raise RunError(f"{error}: evaluate them all with the same --instances and --transfer") from error
    return comparisons


def _require_one_way(paths: Sequence[Path], trained: Sequence[TrainSettings]) -> None:
    for path, settings in zip(paths[1:], trained[1:], strict=True):
        differ = [one.key for one in compare_settings(settings, trained[0]) if one.key != "seed"]
        if differ:
            raise ConfigError(
                f"{path} was trained with other settings than {paths[0]} ({', '.join(differ)}): give runs that "
                "differ in their seed alone, or compare ways of training with `esper compare`"
            )
    seeds = [settings.seed for settings in trained]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the runs have training seed {twice}: give every seed once")


def _require_one_length(runs: Sequence[RunDirectory]) -> None:
    played = [read_behaviour(run.behaviour).iteration for run in runs]
    for run, iteration in zip(runs, played, strict=True):
        if iteration != played[0]:
            raise RunError(
                f"{run.path} was evaluated after iteration {iteration}, {runs[0].path} after {played[0]}: train them "
                "equally long and evaluate them again"
            )
